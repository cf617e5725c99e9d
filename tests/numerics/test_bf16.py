"""BF16 rounding against ml_dtypes, and distances against positions in sorted lists, bit by bit."""

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.numerics import bf16

# Around both ends of the low half, around its middle (a tie), and elsewhere.
LOW_HALVES = (
  *range(4), *range(0x7FFC, 0x8005), *range(0xFFFC, 0x10000),
  0x10, 0x1000, 0x1234, 0x3FFF, 0x4000, 0x5555, 0x7F80, 0x8100, 0xA5A5, 0xC000, 0xEFFF,
)  # fmt: skip


def from_bits(*patterns):
  return np.array(patterns, np.uint32).view(np.float32)


def cast_and_back(x):
  with np.errstate(over="ignore"):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def assert_same_bits(actual, expected):
  actual, expected = (np.asarray(v).view(np.uint32) for v in (actual, expected))
  np.testing.assert_array_equal(actual, expected)


@pytest.fixture(scope="module")
def dense():
  """Every high half with each of LOW_HALVES: float32 [65536, len(LOW_HALVES)]."""
  high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
  return (high | np.array(LOW_HALVES, np.uint32)).view(np.float32)


def scan(x):
  return lax.scan(lambda carry, row: (carry, bf16.round_bf16(row)), jnp.int32(0), x)[1]


def carried(x):
  """Rounds in the carry of a loop, where a compiler that keeps excess precision would keep it."""

  def step(i, c):
    return jnp.where(i == 0, bf16.round_bf16(c), c)

  return lax.fori_loop(0, 2, step, x)


RUNS = {
  "numpy": bf16.round_bf16,
  "eager": lambda x: bf16.round_bf16(jnp.asarray(x)),
  "jit": jax.jit(bf16.round_bf16),
  "vmap": lambda x: jax.vmap(bf16.round_bf16, in_axes=1, out_axes=1)(jnp.asarray(x)),
  "jit_vmap": jax.jit(jax.vmap(bf16.round_bf16)),
  "scan": jax.jit(scan),
  "carried": jax.jit(carried),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_round_is_the_cast_on_every_high_half(run, dense):
  rounded = np.asarray(run(dense))
  number = ~np.isnan(dense)
  assert number.sum() > 1_500_000
  assert rounded.dtype == np.float32
  assert_same_bits(rounded[number], cast_and_back(dense[number]))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_nan_stays_nan_with_its_sign(run, dense):
  rounded = np.asarray(run(dense)).view(np.uint32)
  nan = np.isnan(dense)
  assert nan.sum() > 2 * 127 * len(LOW_HALVES)
  assert_same_bits(rounded[nan], (dense.view(np.uint32)[nan] | 0x00400000) & 0xFFFF0000)


def test_the_papers_rule_would_turn_a_nan_into_infinity():
  signalling = from_bits(0x7F800001, 0xFF80FFFF)
  assert np.isinf((signalling.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)).all()
  assert_same_bits(bf16.round_bf16(signalling), from_bits(0x7FC00000, 0xFFC00000))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_subnormals_are_kept(run):
  x = from_bits(0x00010000, 0x807F0000, 0x00008001, 0x00008000, 0x00018000).reshape(1, -1)
  expected = from_bits(0x00010000, 0x807F0000, 0x00010000, 0x00000000, 0x00020000).reshape(1, -1)
  assert_same_bits(run(x), expected)


def test_round_ties_to_even_and_overflows_to_infinity():
  # 1 + 2^-8, 1 + 3·2^-8, FLT_MAX, the largest value that stays finite, and -0.
  x = from_bits(0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F7FFF, 0x80000000)
  expected = from_bits(0x3F800000, 0x3F820000, 0x7F800000, 0x7F7F0000, 0x80000000)
  assert_same_bits(bf16.round_bf16(x), expected)


def test_round_keeps_any_shape():
  for shape in ((), (0,), (3, 5, 1)):
    assert bf16.round_bf16(np.ones(shape, np.float32)).shape == shape
    assert bf16.round_bf16(jnp.ones(shape, jnp.float32)).shape == shape


@hypothesis.given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
def test_round_goes_to_a_nearest_bf16_value_and_stays(x):
  rounded = bf16.round_bf16(np.float32([x]))
  assert bf16.is_bf16(rounded).all()
  assert_same_bits(bf16.round_bf16(rounded), rounded)
  toward_zero = int(np.float32([x]).view(np.uint32)[0]) & 0xFFFF0000
  enclosing = from_bits(toward_zero, toward_zero + 0x10000)
  # Beyond the largest finite value lies infinity, where the next value would be.
  to_zero, away, to_rounded = (
    abs(np.clip(float(v), -(2.0**128), 2.0**128) - x) for v in (*enclosing, *rounded)
  )
  assert to_rounded == min(to_zero, away)


def test_is_bf16():
  x = from_bits(0x3F800000, 0x3F800001, 0x80000000, 0x00008000, 0x7F800000, 0x7F800001)
  expected = [True, False, True, False, True, False]
  for run in (bf16.is_bf16, jax.jit(bf16.is_bf16)):
    np.testing.assert_array_equal(run(x), expected)


def bf16_numbers():
  """All BF16 numbers in ascending order with -0 beside +0, and each one's position."""
  x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
  x = np.sort(x[~np.isnan(x)], kind="stable")
  return x, np.cumsum(np.r_[0, x[1:] != x[:-1]])


def test_bf16_distance_counts_positions_in_the_sorted_list():
  x, position = bf16_numbers()
  i, j = np.random.default_rng(0).integers(len(x), size=(2, 100_000))
  i[:3], j[:3] = (0, 0, len(x) - 1), (len(x) - 1, 0, len(x) - 1)  # from -inf to +inf and back
  expected = np.abs(position[i] - position[j])
  assert expected[0] == 65280
  distance = bf16.ulp_bf16_distance(x[i], x[j])
  assert distance.dtype == np.int64
  np.testing.assert_array_equal(distance, expected)
  np.testing.assert_array_equal(jax.jit(bf16.ulp_bf16_distance)(x[i], x[j]), expected)
  np.testing.assert_array_equal(jax.vmap(bf16.ulp_bf16_distance)(x[i], x[j]), expected)


@pytest.mark.parametrize("start", [0.0, 1.0, -1.0, 2.0**-126, np.finfo(np.float32).max])
def test_float32_distance_counts_nextafter_steps(start):
  down, up = [np.float32(start)], [np.float32(start)]
  with np.errstate(under="ignore", over="ignore"):
    for _ in range(40):
      down.append(np.nextafter(down[-1], np.float32(-np.inf)))
      up.append(np.nextafter(up[-1], np.float32(np.inf)))
  walk = np.array([*down[:0:-1], *up])
  position = np.cumsum(np.r_[0, walk[1:] != walk[:-1]])  # beyond infinity there is nowhere to go
  i, j = np.indices((len(walk), len(walk)))
  expected = np.abs(position[i] - position[j])
  np.testing.assert_array_equal(bf16.ulp_distance(walk[i], walk[j]), expected)
  np.testing.assert_array_equal(jax.jit(bf16.ulp_distance)(walk[i], walk[j]), expected)


def test_float32_distance_fits_and_zeros_are_one_number():
  a = np.float32([-np.inf, -0.0, 0.0, np.inf])
  b = np.float32([np.inf, 0.0, -0.0, 0.0])
  expected = [0xFF000000, 0, 0, 0x7F800000]
  distance = bf16.ulp_distance(a, b)
  assert distance.dtype == np.int64
  np.testing.assert_array_equal(distance, expected)
  in_xla = bf16.ulp_distance(jnp.asarray(a), jnp.asarray(b))
  assert in_xla.dtype == jnp.uint32
  np.testing.assert_array_equal(in_xla, expected)


def test_distances_have_no_value_for_nan():
  nan, one = np.float32([np.nan]), np.ones(1, np.float32)
  for distance in (bf16.ulp_distance, bf16.ulp_bf16_distance):
    for pair in ((nan, one), (one, nan)):
      with pytest.raises(ValueError, match=f"{distance.__name__}: expected .*, not NaN"):
        distance(*pair)
      assert jax.jit(distance)(*pair) == np.uint32(2**32 - 1)


def test_bf16_distance_refuses_other_values():
  pair = np.float32([1.0]), from_bits(0x3F800001)
  with pytest.raises(ValueError, match="ulp_bf16_distance: expected BF16 values"):
    bf16.ulp_bf16_distance(*pair)
  assert jax.jit(bf16.ulp_bf16_distance)(*pair) == np.uint32(2**32 - 1)


@pytest.mark.parametrize("bad", [1.0, np.ones(2), np.ones(2, np.int32), jnp.ones(2, jnp.bfloat16)])
def test_other_dtypes_are_refused(bad):
  good = np.ones(2, np.float32)
  calls = {
    "round_bf16": lambda: bf16.round_bf16(bad),
    "is_bf16": lambda: bf16.is_bf16(bad),
    "ulp_distance": lambda: bf16.ulp_distance(good, bad),
    "ulp_bf16_distance": lambda: bf16.ulp_bf16_distance(bad, good),
  }
  for name, call in calls.items():
    with pytest.raises(TypeError, match=f"{name}: expected a float32 array"):
      call()


@pytest.mark.slow
@pytest.mark.parametrize("run", [RUNS["numpy"], RUNS["jit"]], ids=["numpy", "jit"])
def test_round_is_the_cast_on_every_input(run):
  chunk = 1 << 24
  for start in range(0, 1 << 32, chunk):
    x = np.arange(start, start + chunk, dtype=np.uint32).view(np.float32)
    rounded, nan = np.asarray(run(x)), np.isnan(x)
    assert_same_bits(rounded[~nan], cast_and_back(x[~nan]))
    assert np.isnan(rounded[nan]).all()
