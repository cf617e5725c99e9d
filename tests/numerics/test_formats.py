"""Number formats, bit by bit: double loops and ml_dtypes."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.numerics import formats
from tests.oracles import assert_same_bits
from tests.ways import check_runs, normal_rows, runs

ALL_BYTES = np.arange(256, dtype=np.uint8)
FP4_TABLE = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=100)


def times_in_double(values, scales):
  """IEEE multiplication: a float32 by a power of two is exact in double, so it is rounded once."""
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    return (values.astype(np.float64) * scales.astype(np.float64)).astype(np.float32)


def test_e8m0_is_ml_dtypes():
  expected = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  assert expected[0] == 2.0**-127
  assert np.isnan(expected[255])
  check_runs(formats.decode_e8m0, (ALL_BYTES,), expected)


def test_fp8_is_ml_dtypes():
  expected = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  assert np.nanmax(expected) == 448
  check_runs(formats.decode_fp8, (ALL_BYTES,), expected)


def test_fp4_is_ml_dtypes_with_one_zero():
  codes = np.arange(16, dtype=np.uint8)
  theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  assert_same_bits(theirs + np.float32(0), FP4_TABLE)  # -0 + 0 is +0
  check_runs(formats.decode_fp4, (codes,), FP4_TABLE)
  assert formats.decode_fp4(np.uint8([[[7, 9]]])).shape == (1, 1, 2)


def test_fp4_codes_above_15_are_refused_or_cut():
  with pytest.raises(ValueError, match="decode_fp4: expected codes 0 to 15, got 17"):
    formats.decode_fp4(np.uint8([3, 17]))
  assert_same_bits(formats.decode_fp4(jnp.asarray([3, 17], jnp.uint8)), FP4_TABLE[[3, 1]])


def test_unpack_puts_the_low_nibble_first():
  packed = np.arange(0, 256, 7, dtype=np.uint8).reshape(1, -1)
  expected = np.ravel([(byte % 16, byte // 16) for byte in packed[0].tolist()])[None]
  for run in runs(formats.unpack_fp4).values():
    codes = run(packed)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, expected)
  assert formats.unpack_fp4(np.zeros((2, 3, 5), np.uint8)).shape == (2, 3, 10)


@pytest.mark.parametrize("decode", [formats.decode_fp8, formats.decode_fp4])
def test_every_code_times_every_scale(decode):
  codes = np.arange(256 if decode is formats.decode_fp8 else 16, dtype=np.uint8)
  values = np.repeat(decode(codes)[:, None], 256, axis=1)
  scales = np.repeat(ALL_BYTES[None], len(codes), axis=0)
  expected = times_in_double(values, scales.view(ml_dtypes.float8_e8m0fnu))
  size = np.abs(expected)
  assert np.sum((size > 0) & (size < 2.0**-126)) > 5
  check_runs(formats.scale_by_e8m0, (values, scales), expected)


def test_scaling_any_float32_is_ieee_multiplication():
  """Exponent fields and fractions at the ends and in the middle, times every scale."""
  fields = np.r_[:30, 100, 126:130, 225:256].astype(np.uint32)
  fractions_ = np.r_[
    :5, 0x400000, 0x3FFFFF, 0x400001, 0x7FFFFE, 0x7FFFFF, 0x555555, 0x2AAAAA, 0x123456
  ].astype(np.uint32)
  u = np.ravel(fields[:, None] << 23 | fractions_)
  values = np.repeat(np.r_[u, u | 0x80000000].view(np.float32)[:, None], 256, axis=1)
  scales = np.repeat(ALL_BYTES[None], len(values), axis=0)
  expected = times_in_double(values, formats.decode_e8m0(scales))
  check_runs(formats.scale_by_e8m0, (values, scales), expected)


def test_scales_broadcast():
  values = normal_rows(4, (5, 3))
  scales = np.uint8([[120], [127], [0], [254], [255]])
  expected = times_in_double(values, formats.decode_e8m0(scales))
  for xp in (np, jnp):
    assert_same_bits(formats.scale_by_e8m0(xp.asarray(values), xp.asarray(scales)), expected)


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (9, 13), (3, 11, 5)])
@pytest.mark.parametrize("scale_dtype", [np.uint8, np.float32])
def test_dequantize_fp8_is_the_double_loop(shape, scale_dtype):
  rng = np.random.default_rng(6)
  block = (4, 3)
  codes = rng.integers(0, 256, shape, np.uint8)
  blocks = (*shape[:-2], -(-shape[-2] // 4), -(-shape[-1] // 3))
  scales = rng.integers(0, 256, blocks, np.uint8)
  factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  if scale_dtype == np.float32:
    scales = factors = normal_rows(7, blocks)
  expected = np.zeros(shape, np.float32)
  for *lead, i, j in np.ndindex(shape):
    factor = factors[(*lead, i // 4, j // 3)]
    value = codes[(*lead, i, j)].view(ml_dtypes.float8_e4m3fn)
    expected[(*lead, i, j)] = times_in_double(np.float32(value), factor)
  for run in (formats.dequantize_fp8, jax.jit(formats.dequantize_fp8, static_argnums=2)):
    assert_same_bits(run(codes, scales, block), expected)
  if len(shape) == 3:
    dequantize = functools.partial(formats.dequantize_fp8, block=block)
    check_runs(dequantize, (codes, scales), expected)


def test_dequantize_fp8_has_blocks_of_128():
  codes = np.full((130, 257), 0x38, np.uint8)  # 1.0
  scales = np.uint8([[127, 128, 129], [130, 131, 132]])
  values = formats.dequantize_fp8(codes, scales)
  assert_same_bits(values[::129, ::128], np.float32([[1, 2, 4], [8, 16, 32]]))
  assert (values[:128, :128] == 1).all() and (values[128:, 128:256] == 16).all()


def test_a_float32_scale_is_rounded_before_what_follows():
  """The product may not be contracted into a fused multiply-add with the sum after it."""
  rng = np.random.default_rng(8)
  codes = rng.integers(0, 0x7F, (64, 64), np.uint8)
  scales, other = normal_rows(9, (64, 64), 2), normal_rows(10, (64, 64), 2)
  expected = formats.dequantize_fp8(codes, scales, (1, 1)) + other
  fused = jax.jit(lambda c, s, o: formats.dequantize_fp8(c, s, (1, 1)) + o)
  assert_same_bits(fused(codes, scales, other), expected)


@pytest.mark.parametrize("shape", [(1, 6), (5, 12), (2, 3, 18)])
def test_dequantize_fp4_is_the_double_loop(shape):
  rng = np.random.default_rng(11)
  codes = rng.integers(0, 16, shape, np.uint8)
  packed = codes[..., ::2] | codes[..., 1::2] << 4
  scales = rng.integers(0, 256, (*shape[:-1], shape[-1] // 6), np.uint8)
  factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  expected = np.zeros(shape, np.float32)
  for *lead, j in np.ndindex(shape):
    expected[(*lead, j)] = times_in_double(FP4_TABLE[codes[(*lead, j)]], factors[(*lead, j // 6)])
  check_runs(lambda p, s: formats.dequantize_fp4(p, s, 6), (packed, scales), expected)


def test_dequantize_fp4_has_groups_of_32():
  packed = np.full((1, 32), 0x21, np.uint8)
  values = formats.dequantize_fp4(packed, np.uint8([[127, 130]]))
  assert_same_bits(values, np.float32([[0.5, 1] * 16 + [4, 8] * 16]))


@hypothesis.given(st.integers(0, 255), st.integers(40, 200))
@SETTINGS
def test_checkpoint_values_are_exact_in_bf16(code, scale):
  value = formats.dequantize_fp8(np.uint8([[code]]), np.uint8([[scale]]))
  assert_same_bits(value.astype(ml_dtypes.bfloat16).astype(np.float32), value)


def test_formats_refuse():
  signed, codes = np.zeros((2, 4), np.int8), np.zeros((2, 4), np.uint8)
  for function in (formats.decode_e8m0, formats.decode_fp8, formats.decode_fp4):
    with pytest.raises(TypeError, match=f"{function.__name__}: codes must be uint8, got int8"):
      function(signed)
  with pytest.raises(TypeError, match="unpack_fp4: packed must be uint8, got int8"):
    formats.unpack_fp4(signed)
  with pytest.raises(ValueError, match="unpack_fp4: expected packed"):
    formats.unpack_fp4(np.uint8(1))
  with pytest.raises(TypeError, match="scale_by_e8m0: expected a float32 array, got float64"):
    formats.scale_by_e8m0(np.ones(4), codes)
  with pytest.raises(TypeError, match="scale_by_e8m0: scale_codes must be uint8, got int8"):
    formats.scale_by_e8m0(np.ones((2, 4), np.float32), signed)
  with pytest.raises(TypeError, match="dequantize_fp8: scales are missing"):
    formats.dequantize_fp8(codes, None)
  with pytest.raises(TypeError, match="dequantize_fp8: scales must be uint8 or float32, got int8"):
    formats.dequantize_fp8(codes, signed)
  with pytest.raises(TypeError, match="dequantize_fp8: codes must be uint8, got int8"):
    formats.dequantize_fp8(signed, codes)
  with pytest.raises(ValueError, match=r"\(2, 4\) in blocks of \(1, 3\) need scales \(2, 2\), got"):
    formats.dequantize_fp8(codes, codes, (1, 3))
  with pytest.raises(ValueError, match=r"dequantize_fp8: expected codes \[\.\.\., N, K\]"):
    formats.dequantize_fp8(codes[0], codes)
  with pytest.raises(TypeError, match="dequantize_fp4: scales are missing"):
    formats.dequantize_fp4(codes, None)
  with pytest.raises(TypeError, match="dequantize_fp4: scales must be uint8, got float32"):
    formats.dequantize_fp4(codes, np.ones((2, 2), np.float32))
  with pytest.raises(ValueError, match=r"in groups of 4 codes needs scales \(2, 2\), got \(2, 3\)"):
    formats.dequantize_fp4(codes, np.ones((2, 3), np.uint8), 4)
  with pytest.raises(ValueError, match="dequantize_fp4: groups of 3 do not divide the rows of 8"):
    formats.dequantize_fp4(codes, np.ones((2, 2), np.uint8), 3)
