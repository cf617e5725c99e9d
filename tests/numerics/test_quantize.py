"""Simulated quantisers, bit by bit: scalar loops, rational arithmetic and ml_dtypes."""

import fractions
import functools
import math

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.numerics import quantize
from tests.oracles import assert_same_bits
from tests.ways import check_runs, normal_rows, runs

ALL_BYTES = np.arange(256, dtype=np.uint8)
FP4_TABLE = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=100)


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


def test_bits_may_be_an_operand():
  x, bits = normal_rows(0, (7, 24)), np.arange(2, 9, dtype=np.int32)
  each = [quantize.fake_quantize(row, int(b)) for row, b in zip(x, bits)]
  check_runs(quantize.fake_quantize, (x, bits), np.stack(each))


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
