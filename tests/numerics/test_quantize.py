"""Quantisers and number formats, bit by bit: scalar loops, rational arithmetic and ml_dtypes."""

import fractions
import functools
import math

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.numerics import quantize

ALL_BYTES = np.arange(256, dtype=np.uint8)
FP4_TABLE = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=100)


def assert_same_bits(actual, expected):
  """Equal bits, where every NaN is one."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert actual.dtype == expected.dtype == np.float32
  nan = np.isnan(expected)
  np.testing.assert_array_equal(np.isnan(actual), nan)
  np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def runs(function):
  """The function under NumPy, eager XLA, jit, vmap over leading axes and scan over them."""

  def in_scan(*operands):
    return lax.scan(lambda c, rows: (c, function(*rows)), jnp.int32(0), operands)[1]

  return {
    "numpy": function,
    "eager": lambda *operands: function(*map(jnp.asarray, operands)),
    "jit": jax.jit(function),
    "vmap": jax.jit(jax.vmap(function)),
    "scan": jax.jit(in_scan),
  }


def check_runs(function, operands, expected, names=("numpy", "eager", "jit", "vmap", "scan")):
  for name in names:
    assert_same_bits(runs(function)[name](*operands), expected)


def normal_rows(seed, shape, binades=20):
  """float32 with the scale of each row drawn from 2^-binades .. 2^binades."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  return np.ldexp(x, rng.integers(-binades, binades, (*shape[:-1], 1)))


def times_in_double(values, scales):
  """IEEE multiplication: a float32 by a power of two is exact in double, so it is rounded once."""
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    return (values.astype(np.float64) * scales.astype(np.float64)).astype(np.float32)


# fake_quantize


def fake_quantize_row(x, bits, strength=1.0):
  """One group, one float32 operation at a time."""
  levels = 2 ** (bits - 1)
  delta = np.float32(max(abs(v) for v in x)) / np.float32(levels - 1)
  strength = np.float32(strength)
  result = []
  for v in x:
    q = 0.0 if delta == 0 else float(np.rint(v / delta))
    q = np.float32(math.copysign(min(max(q, -levels), levels - 1), q))
    quantized = np.float32(0) if delta == 0 else q * delta
    if strength == 0:
      result.append(v)
    elif strength == 1:
      result.append(quantized)
    else:
      result.append(v + strength * (quantized - v))
  return np.array(result, np.float32)


def fake_quantize_rows(x, bits, strength=1.0):
  rows = [fake_quantize_row(row, bits, strength) for row in x.reshape(-1, x.shape[-1])]
  return np.reshape(rows, x.shape)


@pytest.mark.parametrize("bits", range(2, 9))
def test_fake_quantize_is_the_scalar_loop(bits):
  x = normal_rows(bits, (13, 5, 33))
  names = ("numpy", "eager", "jit", "vmap", "scan") if bits == 4 else ("numpy", "jit", "vmap")
  check_runs(lambda x: quantize.fake_quantize(x, bits), (x,), fake_quantize_rows(x, bits), names)


def test_strength_goes_part_of_the_way():
  strengths = np.float32([0.0, 0.1, 0.5, 0.7, 1.0, 1.5, -0.3]).reshape(7, 1, 1)
  x = normal_rows(1, (7, 5, 67))
  x[:, 0] = 0  # groups without a scale
  expected = np.stack([fake_quantize_rows(*row) for row in zip(x, [4] * 7, strengths.ravel())])

  def by_row(x, s):
    return quantize.fake_quantize(x, 4, strength=s)

  check_runs(by_row, (x, strengths), expected, ("numpy", "eager", "jit"))
  check_runs(by_row, (x, strengths.reshape(7)), expected, ("vmap", "scan"))
  with_number = functools.partial(quantize.fake_quantize, bits=4, strength=0.7)
  check_runs(with_number, (x[3],), expected[3], ("numpy", "jit", "vmap"))


def test_one_program_serves_a_sweep_of_strengths():
  x = normal_rows(2, (3, 32))
  strengths = np.float32([0, 0.25, 0.3, 1, 2])
  sweep = jax.jit(jax.vmap(lambda s: quantize.fake_quantize(x, 4, strength=s)))(strengths)
  assert_same_bits(sweep, np.stack([fake_quantize_rows(x, 4, s) for s in strengths]))


def test_strength_zero_is_the_identity_in_every_bit():
  x = np.float32([[0.0, -0.0, 1.5, -3.25, 2.0**-149, -(2.0**-140)], [-0.0] * 6, [2.0**-130] * 6])
  zero = np.zeros((3, 1), np.float32)
  for run in runs(lambda x, s: quantize.fake_quantize(x, 4, strength=s)).values():
    assert_same_bits(run(x, zero), x)


def test_zeros_become_plus_zero_and_small_values_keep_their_sign():
  x = np.float32([[0.0, -0.0, 0.0], [7.0, -0.1, 0.1]])
  expected = np.float32([[0.0, 0.0, 0.0], [7.0, -0.0, 0.0]])
  check_runs(lambda x: quantize.fake_quantize(x, 4), (x,), expected, ("numpy", "jit"))


def test_ties_go_to_even_levels():
  x = np.float32([[7, 0.5, 1.5, 2.5, -0.5, -1.5, -6.5, -7]])
  expected = np.float32([[7, 0, 2, 2, -0.0, -2, -6, -7]])
  check_runs(lambda x: quantize.fake_quantize(x, 4), (x,), expected, ("numpy", "jit"))


@pytest.mark.parametrize(("axis", "group"), [(-1, 4), (0, 3), (1, 5), (1, None), (-3, 6), (2, 1)])
def test_axis_and_group_choose_who_shares_a_scale(axis, group):
  x = normal_rows(3, (6, 5, 8))
  last = np.moveaxis(x, axis, -1)
  rows = last.reshape(-1, group or last.shape[-1])
  expected = np.moveaxis(fake_quantize_rows(rows, 3).reshape(last.shape), -1, axis)
  for run in (quantize.fake_quantize, jax.jit(quantize.fake_quantize, static_argnums=(1, 2, 3))):
    assert_same_bits(run(x, 3, axis, group), expected)


@hypothesis.given(
  hnp.arrays(np.float32, (3, 8), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
  st.integers(2, 8),
)
@SETTINGS
def test_fake_quantize_properties(x, bits):
  x = np.where(np.abs(x) < 2.0**-60, np.float32(0), x)
  quantized = quantize.fake_quantize(x, bits)
  largest = np.abs(x).max(axis=-1, keepdims=True)
  delta = largest / np.float32(2 ** (bits - 1) - 1)
  assert (np.abs(quantized - x) <= delta * np.float32(0.500001)).all()
  assert_same_bits(np.abs(quantize.fake_quantize(-x, bits)), np.abs(quantized))
  assert_same_bits(jax.jit(quantize.fake_quantize, static_argnums=1)(x, bits), quantized)


def test_fake_quantize_refuses():
  x = np.ones((2, 6), np.float32)
  for bits in (1, 9, 4.5):
    with pytest.raises(ValueError, match=f"fake_quantize: bits must be 2 to 8, got {bits}"):
      quantize.fake_quantize(x, bits)
  for group in (4, 0):
    with pytest.raises(ValueError, match=f"groups of {group} do not divide an axis of 6"):
      quantize.fake_quantize(x, 4, group=group)
  with pytest.raises(ValueError, match="axis 2 is not an axis of shape"):
    quantize.fake_quantize(x, 4, axis=2)
  with pytest.raises(ValueError, match=r"strength \(3,\) does not broadcast to x \(2, 6\)"):
    quantize.fake_quantize(x, 4, strength=np.ones(3, np.float32))
  with pytest.raises(ValueError, match=r"strength \(5, 2, 6\) does not broadcast to x \(2, 6\)"):
    quantize.fake_quantize(x, 4, strength=np.ones((5, 2, 6), np.float32))
  for bad in (x.astype(np.float64), jnp.ones((2, 6), jnp.bfloat16), [1.0]):
    with pytest.raises(TypeError, match="fake_quantize: expected a float32 array"):
      quantize.fake_quantize(bad, 4)
  with pytest.raises(TypeError, match="strength: expected a float32 array, got float64"):
    quantize.fake_quantize(x, 4, strength=np.ones(()))


# Formats


def test_e8m0_is_ml_dtypes():
  expected = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  assert expected[0] == 2.0**-127
  assert np.isnan(expected[255])
  check_runs(quantize.decode_e8m0, (ALL_BYTES,), expected)


def test_fp8_is_ml_dtypes():
  expected = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  assert np.nanmax(expected) == 448
  check_runs(quantize.decode_fp8, (ALL_BYTES,), expected)


def test_fp4_is_ml_dtypes_with_one_zero():
  codes = np.arange(16, dtype=np.uint8)
  theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  assert_same_bits(theirs + np.float32(0), FP4_TABLE)  # -0 + 0 is +0
  check_runs(quantize.decode_fp4, (codes,), FP4_TABLE)
  assert quantize.decode_fp4(np.uint8([[[7, 9]]])).shape == (1, 1, 2)


def test_fp4_codes_above_15_are_refused_or_cut():
  with pytest.raises(ValueError, match="decode_fp4: expected codes 0 to 15, got 17"):
    quantize.decode_fp4(np.uint8([3, 17]))
  assert_same_bits(quantize.decode_fp4(jnp.asarray([3, 17], jnp.uint8)), FP4_TABLE[[3, 1]])


def test_unpack_puts_the_low_nibble_first():
  packed = np.arange(0, 256, 7, dtype=np.uint8).reshape(1, -1)
  expected = np.ravel([(byte % 16, byte // 16) for byte in packed[0].tolist()])[None]
  for run in runs(quantize.unpack_fp4).values():
    codes = run(packed)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, expected)
  assert quantize.unpack_fp4(np.zeros((2, 3, 5), np.uint8)).shape == (2, 3, 10)


@pytest.mark.parametrize("decode", [quantize.decode_fp8, quantize.decode_fp4])
def test_every_code_times_every_scale(decode):
  codes = np.arange(256 if decode is quantize.decode_fp8 else 16, dtype=np.uint8)
  values = np.repeat(decode(codes)[:, None], 256, axis=1)
  scales = np.repeat(ALL_BYTES[None], len(codes), axis=0)
  expected = times_in_double(values, scales.view(ml_dtypes.float8_e8m0fnu))
  size = np.abs(expected)
  assert np.sum((size > 0) & (size < 2.0**-126)) > 5
  check_runs(quantize.scale_by_e8m0, (values, scales), expected)


def test_scaling_any_float32_is_ieee_multiplication():
  """Exponent fields and fractions at the ends and in the middle, times every scale."""
  fields = np.r_[:30, 100, 126:130, 225:256].astype(np.uint32)
  fractions_ = np.r_[
    :5, 0x400000, 0x3FFFFF, 0x400001, 0x7FFFFE, 0x7FFFFF, 0x555555, 0x2AAAAA, 0x123456
  ].astype(np.uint32)
  u = np.ravel(fields[:, None] << 23 | fractions_)
  values = np.repeat(np.r_[u, u | 0x80000000].view(np.float32)[:, None], 256, axis=1)
  scales = np.repeat(ALL_BYTES[None], len(values), axis=0)
  expected = times_in_double(values, quantize.decode_e8m0(scales))
  check_runs(quantize.scale_by_e8m0, (values, scales), expected)


def test_scales_broadcast():
  values = normal_rows(4, (5, 3))
  scales = np.uint8([[120], [127], [0], [254], [255]])
  expected = times_in_double(values, quantize.decode_e8m0(scales))
  for xp in (np, jnp):
    assert_same_bits(quantize.scale_by_e8m0(xp.asarray(values), xp.asarray(scales)), expected)


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
  for run in (quantize.dequantize_fp8, jax.jit(quantize.dequantize_fp8, static_argnums=2)):
    assert_same_bits(run(codes, scales, block), expected)
  if len(shape) == 3:
    dequantize = functools.partial(quantize.dequantize_fp8, block=block)
    check_runs(dequantize, (codes, scales), expected)


def test_dequantize_fp8_has_blocks_of_128():
  codes = np.full((130, 257), 0x38, np.uint8)  # 1.0
  scales = np.uint8([[127, 128, 129], [130, 131, 132]])
  values = quantize.dequantize_fp8(codes, scales)
  assert_same_bits(values[::129, ::128], np.float32([[1, 2, 4], [8, 16, 32]]))
  assert (values[:128, :128] == 1).all() and (values[128:, 128:256] == 16).all()


def test_a_float32_scale_is_rounded_before_what_follows():
  """The product may not be contracted into a fused multiply-add with the sum after it."""
  rng = np.random.default_rng(8)
  codes = rng.integers(0, 0x7F, (64, 64), np.uint8)
  scales, other = normal_rows(9, (64, 64), 2), normal_rows(10, (64, 64), 2)
  expected = quantize.dequantize_fp8(codes, scales, (1, 1)) + other
  fused = jax.jit(lambda c, s, o: quantize.dequantize_fp8(c, s, (1, 1)) + o)
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
  check_runs(lambda p, s: quantize.dequantize_fp4(p, s, 6), (packed, scales), expected)


def test_dequantize_fp4_has_groups_of_32():
  packed = np.full((1, 32), 0x21, np.uint8)
  values = quantize.dequantize_fp4(packed, np.uint8([[127, 130]]))
  assert_same_bits(values, np.float32([[0.5, 1] * 16 + [4, 8] * 16]))


@hypothesis.given(st.integers(0, 255), st.integers(40, 200))
@SETTINGS
def test_checkpoint_values_are_exact_in_bf16(code, scale):
  value = quantize.dequantize_fp8(np.uint8([[code]]), np.uint8([[scale]]))
  assert_same_bits(value.astype(ml_dtypes.bfloat16).astype(np.float32), value)


def test_formats_refuse():
  signed, codes = np.zeros((2, 4), np.int8), np.zeros((2, 4), np.uint8)
  for function in (quantize.decode_e8m0, quantize.decode_fp8, quantize.decode_fp4):
    with pytest.raises(TypeError, match=f"{function.__name__}: codes must be uint8, got int8"):
      function(signed)
  with pytest.raises(TypeError, match="unpack_fp4: packed must be uint8, got int8"):
    quantize.unpack_fp4(signed)
  with pytest.raises(ValueError, match="unpack_fp4: expected packed"):
    quantize.unpack_fp4(np.uint8(1))
  with pytest.raises(TypeError, match="scale_by_e8m0: expected a float32 array, got float64"):
    quantize.scale_by_e8m0(np.ones(4), codes)
  with pytest.raises(TypeError, match="scale_by_e8m0: scale_codes must be uint8, got int8"):
    quantize.scale_by_e8m0(np.ones((2, 4), np.float32), signed)
  with pytest.raises(TypeError, match="dequantize_fp8: scales are missing"):
    quantize.dequantize_fp8(codes, None)
  with pytest.raises(TypeError, match="dequantize_fp8: scales must be uint8 or float32, got int8"):
    quantize.dequantize_fp8(codes, signed)
  with pytest.raises(TypeError, match="dequantize_fp8: codes must be uint8, got int8"):
    quantize.dequantize_fp8(signed, codes)
  with pytest.raises(ValueError, match=r"\(2, 4\) in blocks of \(1, 3\) need scales \(2, 2\), got"):
    quantize.dequantize_fp8(codes, codes, (1, 3))
  with pytest.raises(ValueError, match=r"dequantize_fp8: expected codes \[\.\.\., N, K\]"):
    quantize.dequantize_fp8(codes[0], codes)
  with pytest.raises(TypeError, match="dequantize_fp4: scales are missing"):
    quantize.dequantize_fp4(codes, None)
  with pytest.raises(TypeError, match="dequantize_fp4: scales must be uint8, got float32"):
    quantize.dequantize_fp4(codes, np.ones((2, 2), np.float32))
  with pytest.raises(ValueError, match=r"in groups of 4 codes needs scales \(2, 2\), got \(2, 3\)"):
    quantize.dequantize_fp4(codes, np.ones((2, 3), np.uint8), 4)
  with pytest.raises(ValueError, match="dequantize_fp4: groups of 3 do not divide the rows of 8"):
    quantize.dequantize_fp4(codes, np.ones((2, 2), np.uint8), 3)


# Simulated activation quantisation


def scale_exponent(largest, top):
  """The smallest E with largest <= top · 2^E."""
  largest, exponent = fractions.Fraction(float(largest)), -300
  while largest > top * fractions.Fraction(2) ** exponent:
    exponent += 1
  return exponent


def nearest(v, table, ties):
  """The table's nearest entry to a Fraction: the even code, or the first, on a tie."""
  distances = [abs(fractions.Fraction(float(t)) - v) for t in table]
  best = [code for code, distance in enumerate(distances) if distance == min(distances)]
  return table[min(best, key=lambda code: code % 2) if ties == "even" else best[0]]


def qdq_group(x, floor, top, table, ties):
  exponent = scale_exponent(max(np.abs(x).max(), floor), top)
  scale = fractions.Fraction(2) ** exponent
  result = []
  for v in x:
    size = nearest(abs(fractions.Fraction(float(v))) / scale, table, ties)
    value = math.ldexp(float(size), exponent)
    result.append(value if ties == "zero" and value == 0 else math.copysign(value, v))
  return np.float32(result)


def qdq_fp8_group(x):
  table = ALL_BYTES[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  return qdq_group(x, np.float32(1e-4), 448, table, "even")


def qdq_fp4_group(x, ties):
  return qdq_group(x, np.float32(6 * 2.0**-126), 6, FP4_TABLE[:8], ties)


def by_group(function, x, group):
  return np.reshape([function(row) for row in x.reshape(-1, group)], x.shape)


def activations(group):
  """Groups at many scales; the largest value at, just above and just below top · 2^E; zeros."""
  x = normal_rows(12, (60, group), 10)
  top = 448 if group == 8 else 6
  for row in range(20):
    edge = np.ldexp(np.float32(top), row - 10)
    x[row] *= edge / np.abs(x[row]).max() / 2
    x[row, 3] = (edge, np.nextafter(edge, np.float32(np.inf)), -np.nextafter(edge, np.float32(0)))[
      row % 3
    ]
  x[20] = 0
  x[21] = np.resize(np.float32([-0.0, 1e-5, 1.1e-9, -2.3e-9, 5e-10]), group)
  x[22, 0] = 2.0**127
  x[23, 1] = -(2.0**100)
  return x


def test_qdq_fp8_is_the_rational_rule():
  x = activations(8).reshape(20, 3, 8)
  expected = by_group(qdq_fp8_group, x, 8)
  check_runs(lambda x: quantize.qdq_fp8(x, 8), (x,), expected)


@pytest.mark.parametrize("ties", ["even", "zero"])
def test_qdq_fp4_is_the_rational_rule(ties):
  x = activations(6).reshape(20, 18)
  expected = by_group(lambda row: qdq_fp4_group(row, ties), x, 6)
  check_runs(lambda x: quantize.qdq_fp4(x, 6, ties), (x,), expected)


@pytest.mark.parametrize("ties", ["even", "zero"])
def test_qdq_fp4_of_subnormals(ties):
  """Around the floor the scale is 2^-126, and half of it is a subnormal."""
  x = np.ldexp(np.arange(-30, 30, dtype=np.float32), -129).reshape(10, 6)
  expected = by_group(lambda row: qdq_fp4_group(row, ties), x, 6)
  size = np.abs(expected)
  assert np.sum((size > 0) & (size < 2.0**-126)) > 5
  check_runs(lambda x: quantize.qdq_fp4(x, 6, ties), (x,), expected)


def test_fp8_rounding_is_ml_dtypes_on_a_dense_grid():
  """One group of scale 1 holds every midpoint of the format, its neighbours and 0.1 % steps."""
  table = ALL_BYTES[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  middles = (table[1:] + table[:-1]) / 2
  below, above = (np.nextafter(middles, np.float32(end)) for end in (0, 448))
  grid = np.r_[table, middles, below, above, np.geomspace(1e-5, 448, 13_000).astype(np.float32)]
  x = np.r_[grid, -grid][None]
  expected = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  check_runs(lambda x: quantize.qdq_fp8(x, x.shape[-1]), (x,), expected)


def test_fp4_rounding_and_its_two_ties():
  middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
  below, above = (np.nextafter(middles, np.float32(end)) for end in (0, 6))
  grid = np.r_[middles, below, above, FP4_TABLE[:8], np.linspace(0, 6, 999)].astype(np.float32)
  x = np.r_[grid, -grid][None]
  even = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
  check_runs(lambda x: quantize.qdq_fp4(x, x.shape[-1]), (x,), even)
  to_zero = np.array([[nearest(fractions.Fraction(float(v)), FP4_TABLE, "first") for v in x[0]]])
  check_runs(lambda x: quantize.qdq_fp4(x, x.shape[-1], "zero"), (x,), to_zero)
  assert set(np.abs(x[even != to_zero])) == {0.75, 1.75, 3.5}


def test_groups_are_independent_and_have_their_defaults():
  x = normal_rows(13, (3, 512))
  for qdq, group in ((quantize.qdq_fp8, 128), (quantize.qdq_fp4, 32)):
    expected = np.concatenate([qdq(part) for part in np.split(x, 512 // group, axis=1)], axis=1)
    assert_same_bits(qdq(x), expected)
    assert_same_bits(jax.jit(qdq)(x), expected)


@pytest.mark.parametrize("qdq", [quantize.qdq_fp8, quantize.qdq_fp4])
def test_a_value_that_is_not_finite_spoils_its_group(qdq):
  x = normal_rows(14, (4, 16))
  expected = qdq(x, 8)
  x[range(4), 9] = np.nan, -np.nan, np.inf, -np.inf
  expected[:, 8:] = np.nan
  check_runs(lambda x: qdq(x, 8), (x,), expected, ("numpy", "jit"))


qdq_fp8_jit = jax.jit(lambda x: quantize.qdq_fp8(x, 8))
qdq_fp4_jit = jax.jit(lambda x: quantize.qdq_fp4(x, 8))


@hypothesis.given(
  hnp.arrays(np.float32, (2, 8), elements=st.floats(-(2.0**126), 2.0**126, width=32))
)
@SETTINGS
def test_qdq_properties(x):
  for qdq, in_xla in ((quantize.qdq_fp8, qdq_fp8_jit), (quantize.qdq_fp4, qdq_fp4_jit)):
    once = qdq(x, 8)
    assert_same_bits(in_xla(x), once)
    assert_same_bits(qdq(-x, 8), -once)
    # If rounding shrinks the largest value past a power of two, the finer grid holds the rest too.
    assert_same_bits(qdq(once, 8), once)


def test_qdq_refuses():
  x = np.ones((2, 48), np.float32)
  with pytest.raises(ValueError, match="qdq_fp8: groups of 128 do not divide an axis of 48"):
    quantize.qdq_fp8(x)
  with pytest.raises(ValueError, match="qdq_fp4: groups of 32 do not divide an axis of 48"):
    quantize.qdq_fp4(x)
  with pytest.raises(ValueError, match='qdq_fp4: ties must be "even" or "zero", got \'up\''):
    quantize.qdq_fp4(x, 16, ties="up")
  with pytest.raises(ValueError, match="qdq_fp8: expected x"):
    quantize.qdq_fp8(np.float32(1))
  for qdq in (quantize.qdq_fp8, quantize.qdq_fp4):
    with pytest.raises(TypeError, match=f"{qdq.__name__}: expected a float32 array, got bfloat16"):
      qdq(jnp.ones((2, 128), jnp.bfloat16))
