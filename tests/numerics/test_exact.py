"""Exact sums and dot products against rational arithmetic, bit by bit."""

import fractions
import itertools
import math

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.numerics import exact

FLOAT32_MAX = np.finfo(np.float32).max
NUM_TERMS = 7


def assert_same_bits(actual, expected):
  actual, expected = (np.asarray(v).view(np.uint32) for v in (actual, expected))
  np.testing.assert_array_equal(actual, expected)


def round_to_float32(value: fractions.Fraction) -> np.float32:
  """To nearest, ties to even, by the definition: a whole number of the result's last places."""
  if value == 0:
    return np.float32(0)
  size = abs(value)
  exponent = size.numerator.bit_length() - size.denominator.bit_length()
  exponent -= size < fractions.Fraction(2) ** exponent  # now 2^exponent <= size < 2^(exponent + 1)
  place = max(exponent, -126) - 23
  count = round(size / fractions.Fraction(2) ** place)  # a Fraction rounds half to even
  if count * fractions.Fraction(2) ** place >= 2**128:
    return np.float32(math.copysign(math.inf, value))
  return np.float32(math.copysign(math.ldexp(count, place), value))


def sum_oracle(terms):
  """The sums of a matrix's columns, in rational arithmetic where every term is finite."""

  def one(column):
    column = [float(v) for v in column]
    if not all(map(math.isfinite, column)):
      return _special(column)
    return round_to_float32(sum(map(fractions.Fraction, column), fractions.Fraction(0)))

  return np.array([one(column) for column in terms.T], np.float32)


def _special(column):
  infinities = {v for v in column if math.isinf(v)}
  if len(infinities) == 1 and not any(map(math.isnan, column)):
    return np.float32(infinities.pop())
  return np.array(0x7FC00000, np.uint32).view(np.float32)[()]


def dot_oracle(a, b):
  def one(pairs):
    return sum((fractions.Fraction(float(x)) * fractions.Fraction(float(y)) for x, y in pairs))

  return np.array([round_to_float32(one(zip(x, y))) for x, y in zip(a.T, b.T)], np.float32)


def random_bits(rng, shape, lowest_field=0, highest_field=254):
  """Random signs and fractions; exponent fields of a range: 0 is subnormal, 254 the largest."""
  field = rng.integers(lowest_field, highest_field, shape, np.uint32, endpoint=True)
  rest = rng.integers(0, 1 << 32, shape, np.uint32) & np.uint32(0x807FFFFF)
  return (field << 23 | rest).view(np.float32)


def spread(rng, n):
  """Exponents over 40 binades."""
  return random_bits(rng, (NUM_TERMS, n), 107, 147)


def everything(rng, n):
  return random_bits(rng, (NUM_TERMS, n))


def cancellation(rng, n):
  """Three pairs of opposites in random places beside one term that is far smaller."""
  large = random_bits(rng, (3, n), 100, 250)
  return rng.permuted(np.concatenate([large, -large, random_bits(rng, (1, n), 0, 100)]), axis=0)


def near_ties(rng, n):
  """x, half its last place in two parts, at times a crumb 60 binades lower, and two opposites."""
  x = random_bits(rng, (1, n), 100, 150)
  place = np.ldexp(np.float32(1), np.frexp(np.abs(x))[1] - 24)  # one unit in x's last place
  halves = place / 4 * rng.choice(np.float32([-1, 1]), n)
  small = place * np.float32(2.0**-60) * rng.choice(np.float32([-1, 0, 0, 1]), n)
  other = random_bits(rng, (1, n), 100, 180)
  return np.concatenate([x, halves, halves, small, other, -other, np.zeros((1, n), np.float32)])


def subnormal(rng, n):
  """Results around 2^-126, from subnormals and from small numbers of which some cancel."""
  terms = random_bits(rng, (NUM_TERMS, n), 0, 2)
  terms[4:] = -terms[:3] * rng.choice(np.float32([0, 1, 1, 1]), (3, n))
  return terms


def overflow(rng, n):
  """Sums around 2^128 - 2^103, where infinity begins, and beyond, some of them only on the way."""
  terms = np.zeros((NUM_TERMS, n), np.float32)
  terms[0] = FLOAT32_MAX
  terms[1] = np.float32(2.0**103) * rng.choice(np.float32([0, 0.5, 1, -1]), n)
  terms[2] = rng.choice(np.float32([0, -1, 1, 2.0**-149]), n)
  terms[3] = FLOAT32_MAX * rng.choice(np.float32([0, 1]), n)
  terms[4] = -terms[3] * rng.choice(np.float32([1, 1, 0.75]), n)
  return rng.permuted(terms * rng.choice(np.float32([-1, 1]), n), axis=0)


def zeros(rng, n):
  """Zeros of both signs, at times with a pair of opposites."""
  terms = rng.choice(np.float32([0, -0.0]), (NUM_TERMS, n))
  terms[0] = random_bits(rng, n) * rng.choice(np.float32([0, 1]), n)
  terms[1] = -terms[0]
  return rng.permuted(terms, axis=0)


def special(rng, n):
  """Infinities and NaN of both signs, some NaN with other payloads, among finite terms."""
  nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
  rare = np.r_[nan, np.resize(np.float32([np.inf, -np.inf]), len(nan))]
  is_rare = rng.random((NUM_TERMS, n)) < 0.15
  return np.where(is_rare, rng.choice(rare, (NUM_TERMS, n)), random_bits(rng, (NUM_TERMS, n)))


FAMILIES = (
  spread, everything, cancellation, near_ties, subnormal, overflow, zeros, special,
)  # fmt: skip


@pytest.fixture(scope="module")
def sum_cases():
  """float32 [NUM_TERMS, 12000] and the expected sums."""
  rng = np.random.default_rng(0)
  terms = np.concatenate([family(rng, 1500) for family in FAMILIES], axis=1)
  return terms, sum_oracle(terms)


def in_scan(terms):
  return lax.scan(lambda c, column: (c, exact.exact_sum(column)), jnp.int32(0), terms.T)[1]


SUMS = {
  "numpy": exact.exact_sum,
  "eager": lambda terms: exact.exact_sum(jnp.asarray(terms)),
  "jit": jax.jit(exact.exact_sum),
  "axis": lambda terms: jax.jit(exact.exact_sum, static_argnums=1)(terms.T, -1),
  "vmap": lambda terms: jax.vmap(exact.exact_sum, in_axes=1)(jnp.asarray(terms)),
  "scan": jax.jit(in_scan),
}


@pytest.mark.parametrize("run", SUMS.values(), ids=SUMS)
def test_sum_is_the_rational_sum_rounded_once(run, sum_cases):
  terms, expected = sum_cases
  assert_same_bits(run(terms), expected)


def test_the_cases_reach_what_they_are_for(sum_cases):
  terms, expected = sum_cases
  size = np.abs(expected)
  assert np.sum((size > 0) & (size < 2.0**-126)) > 400
  assert np.sum(np.isinf(expected) & np.isfinite(terms).all(axis=0)) > 300
  assert np.isnan(expected).sum() > 300
  assert np.sum(expected == 0) > 300
  # Doubles get many of them wrong, and so does adding in order.
  finite = np.isfinite(terms).all(axis=0)
  with np.errstate(over="ignore"):
    in_double = terms[:, finite].astype(np.float64).sum(axis=0).astype(np.float32)
    in_order = terms[:, finite].cumsum(axis=0, dtype=np.float32)[-1]
  assert np.sum(in_double != expected[finite]) > 100
  assert np.sum(in_order != expected[finite]) > 3000


def test_sum_as_a_compile_time_constant(sum_cases):
  terms, expected = (v[..., ::100] for v in sum_cases)
  assert_same_bits(jax.jit(lambda: exact.exact_sum(jnp.asarray(terms)))(), expected)


def test_sum_equals_fsum_where_rounding_twice_is_harmless():
  # Whole numbers below 2^24 times 2^-30: fsum is exact, so there is one rounding.
  rng = np.random.default_rng(1)
  terms = np.ldexp(rng.integers(-(2**24), 2**24, (50, 300)).astype(np.float32), -30)
  expected = [math.fsum(column) for column in terms.T.astype(np.float64)]
  assert_same_bits(exact.exact_sum(terms), np.float32(expected))


def test_every_order_gives_the_same_bits():
  terms = spread(np.random.default_rng(2), 50)[:5]
  orders = np.array(list(itertools.permutations(range(5))))
  sums = exact.exact_sum(terms[orders], axis=1)
  assert sums.shape == (120, 50)
  assert_same_bits(sums, np.broadcast_to(exact.exact_sum(terms), sums.shape))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_any_axis(axis):
  terms = random_bits(np.random.default_rng(3), (3, 4, 5))
  expected = sum_oracle(np.moveaxis(terms, axis, 0).reshape(terms.shape[axis], -1))
  for run in (exact.exact_sum, jax.jit(exact.exact_sum, static_argnums=1)):
    total = run(terms, axis)
    assert total.shape == tuple(np.delete(terms.shape, axis))
    assert_same_bits(np.ravel(total), expected)


def test_one_axis_no_terms_and_one_term():
  x = np.float32([1.0, 2.0**-30, -1.0])
  for terms, expected in ((x, 2.0**-30), (x[:0], 0.0), (x[:1], 1.0), (np.float32([-0.0]), 0.0)):
    for total in (exact.exact_sum(terms), exact.exact_sum(jnp.asarray(terms))):
      assert total.shape == ()
      assert_same_bits(total, np.float32(expected))
  assert_same_bits(exact.exact_sum(np.zeros((0, 3), np.float32)), np.zeros(3, np.float32))


def test_as_many_terms_as_the_limbs_hold():
  """Every limb as full as it can be: all bits set, all of one sign, at many exponents."""
  fields = np.array([1, 2, 5, 9, 16, 17, 100, 229, 230])
  full = np.ldexp(np.float32(2**24 - 1), fields - 150)
  terms = np.tile(np.r_[full, -full], (exact.MAX_TERMS, 1))
  alternating = FLOAT32_MAX * np.resize(np.float32([1, -1]), exact.MAX_TERMS)
  alternating[:2] = 2.0**-149, 0
  terms = np.c_[terms, alternating, random_bits(np.random.default_rng(4), len(alternating), 0, 230)]
  ones = np.ones_like(terms)
  expected = sum_oracle(terms)
  assert np.isfinite(expected).all()
  for xp in (np, jnp):
    assert_same_bits(exact.exact_sum(xp.asarray(terms)), expected)
    assert_same_bits(exact.exact_dot(xp.asarray(terms), xp.asarray(ones), 0), expected)
  largest = np.tile(np.float32([FLOAT32_MAX, 2.0**127]), (exact.MAX_TERMS, 1))
  for xp in (np, jnp):
    x = xp.asarray(largest)
    assert_same_bits(exact.exact_sum(x), np.float32([np.inf] * 2))
    assert_same_bits(exact.exact_dot(x, -x, 0), np.float32([-np.inf] * 2))


def test_more_terms_are_refused():
  terms = np.zeros((exact.MAX_TERMS + 1, 1), np.float32)
  for operand in (terms, jnp.asarray(terms)):
    with pytest.raises(ValueError, match="exact_sum: 16385 terms exceed"):
      exact.exact_sum(operand)
    with pytest.raises(ValueError, match="exact_dot: 16385 terms exceed"):
      exact.exact_dot(operand, operand, axis=0)


any_float32 = st.floats(width=32) | st.sampled_from(
  [float("inf"), float("-inf"), float("nan"), 2.0**-149, float(FLOAT32_MAX), -float(FLOAT32_MAX)]
)


@hypothesis.given(st.lists(any_float32, min_size=6, max_size=6))
@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
def test_any_list_of_floats(values):
  terms = np.float32(values)[:, None]
  expected = sum_oracle(terms)
  assert_same_bits(exact.exact_sum(terms), expected)
  assert_same_bits(SUMS["jit"](terms), expected)


def dot_spread(rng, n):
  return spread(rng, n), spread(rng, n)


def dot_everything(rng, n):
  """Products anywhere from 2^-298 to 2^256."""
  return everything(rng, n), everything(rng, n)


def dot_cancellation(rng, n):
  """a·b in pairs of opposites, whichever factor has the sign, beside one small product."""
  a, b = cancellation(rng, n), random_bits(rng, (NUM_TERMS, n), 100, 250)
  a[3:6], b[3:6] = a[:3], -b[:3]
  a[6], b[6] = random_bits(rng, n, 0, 130), random_bits(rng, n, 90, 130)
  return a, b


def dot_near_ties(rng, n):
  """Products of few bits each, which hit the halves between two results often."""
  a, b = near_ties(rng, n), np.ones((NUM_TERMS, n), np.float32)
  scale = np.ldexp(np.float32(1), rng.integers(-20, 20, n))
  return a * scale, b * scale


def dot_subnormal(rng, n):
  """Sums of products below 2^-149, whose last bits lie up to 149 places lower."""
  return random_bits(rng, (NUM_TERMS, n), 0, 60), random_bits(rng, (NUM_TERMS, n), 0, 70)


def dot_subnormal_ties(rng, n):
  """Odd multiples of 2^-150, halfway between two subnormals, at times with a crumb of 2^-298."""
  a = np.zeros((NUM_TERMS, n), np.float32)
  b = np.zeros((NUM_TERMS, n), np.float32)
  a[0], b[0] = np.ldexp(rng.integers(-99, 99, n).astype(np.float32), -130), np.float32(2.0**-20)
  a[1] = np.float32(2.0**-149)
  b[1] = np.float32(2.0**-149) * rng.choice(np.float32([-1, 0, 0, 1]), n)
  return a, b


def dot_overflow(rng, n):
  """Products of up to 2^256 that cancel, exactly or not."""
  a, b = overflow(rng, n), np.ones((NUM_TERMS, n), np.float32)
  a[5], b[5] = random_bits(rng, (2, n), 240, 254)
  a[6], b[6] = -a[5], b[5] * rng.choice(np.float32([1, 1, 1, 0.5]), n)
  return a, b


DOT_FAMILIES = (
  dot_spread, dot_everything, dot_cancellation, dot_near_ties, dot_subnormal,
  dot_subnormal_ties, dot_overflow,
)  # fmt: skip


@pytest.fixture(scope="module")
def dot_cases():
  """a and b, float32 [NUM_TERMS, 2100], and the expected dot products."""
  rng = np.random.default_rng(5)
  pairs = [family(rng, 300) for family in DOT_FAMILIES]
  a, b = (np.concatenate(operands, axis=1) for operands in zip(*pairs))
  return a, b, dot_oracle(a, b)


def dot_in_scan(a, b):
  return lax.scan(lambda c, pair: (c, exact.exact_dot(*pair)), jnp.int32(0), (a.T, b.T))[1]


DOTS = {
  "numpy": lambda a, b: exact.exact_dot(a, b, axis=0),
  "eager": lambda a, b: exact.exact_dot(jnp.asarray(a), b, axis=0),
  "jit": jax.jit(lambda a, b: exact.exact_dot(a, b, axis=0)),
  "last_axis": jax.jit(lambda a, b: exact.exact_dot(a.T, b.T)),
  "vmap": lambda a, b: jax.vmap(exact.exact_dot, in_axes=1)(jnp.asarray(a), jnp.asarray(b)),
  "scan": jax.jit(dot_in_scan),
}


@pytest.mark.parametrize("run", DOTS.values(), ids=DOTS)
def test_dot_is_the_rational_dot_rounded_once(run, dot_cases):
  a, b, expected = dot_cases
  assert_same_bits(run(a, b), expected)


def test_the_dot_cases_reach_what_they_are_for(dot_cases):
  *_, expected = dot_cases
  size = np.abs(expected)
  assert np.sum((size > 0) & (size < 2.0**-126)) > 200
  assert np.sum(np.isinf(expected)) > 200
  assert np.sum(np.isfinite(expected) & (size > 2.0**-126)) > 500


def test_dot_with_ones_is_the_sum(sum_cases):
  terms, expected = sum_cases
  for ones in (np.ones_like(terms), jnp.ones(terms.shape, jnp.float32)):
    assert_same_bits(exact.exact_dot(terms, ones, axis=0), expected)


@pytest.mark.parametrize(
  ("a", "b", "expected"),
  [
    ((np.inf, 1), (2, 3), np.inf),
    ((np.inf, 1), (-2, 3), -np.inf),
    ((np.inf, -np.inf), (1, -1), np.inf),
    ((np.inf, np.inf), (1, -1), np.nan),
    ((np.inf, 1), (0, 3), np.nan),
    ((-0.0, 1), (np.inf, 3), np.nan),
    ((2.0**-149, 1), (np.inf, 3), np.inf),  # a subnormal is not zero
    ((np.nan, 1), (2, 3), np.nan),
    ((1, np.inf), (np.nan, 1), np.nan),
    ((-0.0, 0), (1, -2), 0),
    ((FLOAT32_MAX, 1), (-FLOAT32_MAX, 3), -np.inf),
  ],
)
def test_dot_of_special_values(a, b, expected):
  a, b = np.float32(a), np.float32(b)
  expected = np.array(0x7FC00000, np.uint32).view(np.float32) if np.isnan(expected) else expected
  assert_same_bits(exact.exact_dot(a, b), np.float32(expected))
  assert_same_bits(exact.exact_dot(jnp.asarray(a), jnp.asarray(b)), np.float32(expected))


@pytest.mark.parametrize("bad", [1.0, np.ones(2), np.ones(2, np.int32), jnp.ones(2, jnp.bfloat16)])
def test_other_dtypes_are_refused(bad):
  good = np.ones(2, np.float32)
  with pytest.raises(TypeError, match="exact_sum: expected a float32 array"):
    exact.exact_sum(bad)
  for pair in ((bad, good), (good, bad)):
    with pytest.raises(TypeError, match="exact_dot: expected a float32 array"):
      exact.exact_dot(*pair)


def test_shapes_that_do_not_fit_are_refused():
  x = np.ones((2, 3), np.float32)
  for axis in (2, -3):
    with pytest.raises(ValueError, match=rf"exact_sum: axis {axis} is not an axis of shape"):
      exact.exact_sum(x, axis)
  with pytest.raises(ValueError, match="exact_sum: axis 0 is not an axis"):
    exact.exact_sum(np.float32(1))
  with pytest.raises(ValueError, match=r"exact_dot: a \(2, 3\) and b \(3, 2\) must have one shape"):
    exact.exact_dot(x, x.T)
