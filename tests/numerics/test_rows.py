"""Row functions: the same bits in every program and batch, scalar loops as oracle, FP64 errors."""

import functools
import math

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.numerics import elementwise, rows

EPS = 1e-6
NAN_BITS = np.uint32(0x7FC00000)
INF = np.inf
NAMES = ("tree_sum", "softmax", "logsumexp", "log_softmax", "rms_norm", "weighted rms_norm")


def every(x, weight):
  return (
    rows.tree_sum(x, keepdims=True),
    rows.softmax(x),
    rows.logsumexp(x, keepdims=True),
    rows.log_softmax(x),
    rows.rms_norm(x, eps=EPS),
    rows.rms_norm(x, weight, eps=EPS),
  )


def mapped(x, weight):
  """Each row by itself, in a loop."""
  return lax.map(lambda row: every(row, weight), x)


def closed_over(x, weight):
  """The arguments as constants of the program, for the compiler to fold."""
  return jax.jit(lambda: every(jnp.asarray(x), jnp.asarray(weight)))()


jitted = jax.jit(every)
RUNS = {
  "eager": lambda x, weight: every(jnp.asarray(x), jnp.asarray(weight)),
  "jit": jitted,
  "vmap": lambda x, weight: jax.vmap(every, (0, None))(jnp.asarray(x), jnp.asarray(weight)),
  "jit_vmap": jax.jit(jax.vmap(every, (0, None))),
  "map": jax.jit(mapped),
  "closed_over": closed_over,
}


def assert_same_bits(actual, expected, note="", names=NAMES):
  for name, a, e in zip(names, actual, expected, strict=True):
    a, e = (np.asarray(v).view(np.uint32) for v in (a, e))
    np.testing.assert_array_equal(a, e, err_msg=f"{name} {note}")


def sample(count, length, seed=0):
  """(x [count, length], weight [length]): rows of different scales, some entries repeated."""
  rng = np.random.default_rng([seed, count, length])
  scale = 4.0 ** rng.integers(-2, 3, (count, 1))
  x = np.where(rng.random((count, length)) < 0.1, 0.5, rng.normal(size=(count, length)) * scale)
  return x.astype(np.float32), rng.uniform(0.5, 1.5, length).astype(np.float32)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("length", [13, 96])
def test_every_program_gives_the_bits_of_numpy(run, length):
  x, weight = sample(50, length)
  assert_same_bits(RUNS[run](x, weight), every(x, weight))


@pytest.mark.parametrize("length", [*range(1, 71), 1000])
def test_no_length_changes_a_bit(length):
  # Four of the six, to save time: the others consist of the same operations.
  def most(x, weight):
    norm = rows.rms_norm(x, weight, eps=EPS)
    return rows.tree_sum(x), rows.softmax(x), rows.log_softmax(x), norm

  x, weight = sample(21, length)
  names = ("tree_sum", "softmax", "log_softmax", "rms_norm")
  assert_same_bits(jax.jit(most)(x, weight), most(x, weight), names=names)


@pytest.mark.parametrize("length", [64, 100])
def test_no_batch_changes_a_bit(length):
  x, weight = sample(720, length)
  expected = every(x, weight)
  for batch in (720, 64, 3, 1):
    for start in (0, 720 - batch):
      part = slice(start, start + batch)
      assert_same_bits(jitted(x[part], weight), [y[part] for y in expected], f"batch {batch}")
  assert_same_bits(jitted(x[::-1], weight), [y[::-1] for y in expected], "reversed")
  assert_same_bits(RUNS["map"](x, weight), expected, "map")


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (0, 5), (4, 1)])
def test_any_leading_axes(shape):
  x, weight = sample(max(1, math.prod(shape[:-1])), shape[-1])
  x = x[: math.prod(shape[:-1])].reshape(shape)
  expected = every(x, weight)
  assert_same_bits(jitted(x, weight), expected)
  for y in (rows.tree_sum(x), rows.logsumexp(x)):
    assert y.shape == shape[:-1] and y.dtype == np.float32
  np.testing.assert_array_equal(rows.tree_sum(x), expected[0][..., 0])
  first, over_first = np.moveaxis(x, -1, 0), functools.partial(rows.tree_sum, axis=0)
  ways = [over_first, lambda x: over_first(jnp.asarray(x)), jax.jit(over_first)]
  if x.ndim > 1:
    ways.append(jax.jit(jax.vmap(over_first, in_axes=1)))
  for way in ways:
    y = way(first)
    np.testing.assert_array_equal(np.asarray(y).view(np.uint32), rows.tree_sum(x).view(np.uint32))
  np.testing.assert_array_equal(rows.logsumexp(x), expected[2][..., 0])


# Oracles: scalars, one row at a time.  The sum goes down from the root, not up from the leaves.


def sum_by_definition(row, start=0, step=1):
  """Halving the row k times leaves, at position i, the sum of every entry i mod N/2^k."""
  width = 1 << (len(row) - 1).bit_length()
  if step == width:
    return row[start] if start < len(row) else np.float32(0)
  return sum_by_definition(row, start, 2 * step) + sum_by_definition(row, start + step, 2 * step)


def softmax_by_definition(row):
  exponentials = [elementwise.exp(v - max(row)) for v in row]
  total = sum_by_definition(exponentials)
  return [e / total if e / total >= 2.0**-125 else 0 for e in exponentials]


def logsumexp_by_definition(row):
  total = sum_by_definition([elementwise.exp(v - max(row)) for v in row])
  return [elementwise.log(total) + max(row)]


def log_softmax_by_definition(row):
  total = sum_by_definition([elementwise.exp(v - max(row)) for v in row])
  return [(v - max(row)) - elementwise.log(total) for v in row]


def rms_norm_by_definition(row, weight=None):
  mean = sum_by_definition([v * v for v in row]) / np.float32(len(row))
  normed = [v / np.sqrt(mean + np.float32(EPS)) for v in row]
  return normed if weight is None else [v * w for v, w in zip(normed, weight)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 13, 31, 64, 65, 100])
def test_scalar_loops_give_the_same_bits(length):
  x, weight = sample(6, length)
  loops = (
    lambda row: [sum_by_definition(row)],
    softmax_by_definition,
    logsumexp_by_definition,
    log_softmax_by_definition,
    rms_norm_by_definition,
    functools.partial(rms_norm_by_definition, weight=list(weight)),
  )
  expected = [np.array([loop(list(row)) for row in x], np.float32) for loop in loops]
  assert_same_bits(every(x, weight), expected)


UNIT = 2.0**-24


def relative_error(actual, exact, floor=0.0):
  """In units of 2^-24, relative to the exact value or to the floor if that is larger."""
  return np.abs(actual - exact) / np.maximum(np.abs(exact), floor) / UNIT


@pytest.mark.parametrize("length", [1, 2, 5, 64, 100, 1000, 4096])
def test_errors_are_within_the_stated_bounds(length):
  x, weight = sample(300, length)
  exact = x.astype(np.float64)
  levels = math.ceil(math.log2(length))
  total, softmax, logsumexp, log_softmax, normed, weighted = every(x, weight)

  magnitude = np.abs(exact).sum(-1, keepdims=True)
  assert (np.abs(total - exact.sum(-1, keepdims=True)) <= levels * UNIT * magnitude).all()

  depth = exact.max(-1, keepdims=True) - exact
  sum_of_exp = np.exp(-depth).sum(-1, keepdims=True)
  exact_softmax = np.exp(-depth) / sum_of_exp
  visible = (depth <= 87) & (exact_softmax >= 2.0**-125)
  error = relative_error(softmax, exact_softmax)
  assert (error <= depth + levels + 6)[visible].all()
  assert (softmax[~visible] == 0).all()

  exact_logsumexp = np.log(sum_of_exp) + exact.max(-1, keepdims=True)
  assert relative_error(logsumexp, exact_logsumexp, floor=1.0).max() <= levels + 4
  assert relative_error(log_softmax, exact - exact_logsumexp, floor=1.0).max() <= levels + 4

  exact_norm = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPS)
  assert relative_error(normed, exact_norm).max() <= levels / 2 + 5
  assert relative_error(weighted, exact_norm * weight).max() <= levels / 2 + 5


@pytest.mark.parametrize("width", [8, 9, 64, 100, 300])
def test_padding_changes_no_bit(width):
  x, _ = sample(40, 7)
  padding = ((0, 0), (0, width - 7))
  for run in (lambda f: f, jax.jit):
    masked = np.pad(x, padding, constant_values=-INF)
    for function in (rows.softmax, rows.logsumexp, rows.log_softmax):
      expected, actual = function(x), np.asarray(run(function)(masked))
      if expected.ndim == 2:
        beyond = 0 if function is rows.softmax else -INF
        expected = np.pad(expected, padding, constant_values=beyond)
      np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
    zeroed = np.asarray(run(rows.tree_sum)(np.pad(x, padding)))
    np.testing.assert_array_equal(zeroed.view(np.uint32), rows.tree_sum(x).view(np.uint32))


@pytest.mark.parametrize("heads", [1, 2, 29, 3000])
def test_softmax_has_no_subnormal_results(heads):
  # `heads` equal maxima, and entries whose share of the sum passes through 2^-126.
  tail = np.linspace(-87.2, -75, 4001)
  x = np.concatenate([np.zeros(heads), tail]).astype(np.float32)[None]
  y = rows.softmax(x)
  assert y.any() and not y.all() and y[y > 0].min() >= 2.0**-125
  for actual in (rows.softmax(jnp.asarray(x)), jax.jit(rows.softmax)(x)):
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint32), y.view(np.uint32))


padded_softmax = jax.jit(rows.softmax)
finite = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False) | st.floats(
  -90, 90, width=32, allow_subnormal=False
)


@hypothesis.settings(deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(finite | st.just(-INF), min_size=1, max_size=24))
def test_softmax_of_any_row_padded_with_minus_infinity(values):
  row = np.array(values, np.float32)
  padded = np.pad(row, (0, 24 - len(row)), constant_values=-INF)
  actual, expected = np.asarray(padded_softmax(padded)), rows.softmax(row)
  np.testing.assert_array_equal(actual[: len(row)].view(np.uint32), expected.view(np.uint32))
  assert (actual[len(row) :] == 0).all() or np.isneginf(row).all()


def test_log_softmax_gives_the_loss_of_a_confident_row_without_overflow():
  x = np.array([[300.0, 0.0], [-300.0, -300.0]], np.float32)
  np.testing.assert_allclose(rows.log_softmax(x), [[0, -300], [-np.log(2)] * 2], rtol=1e-7)


def test_another_axis_is_refused():
  with pytest.raises(ValueError, match=r"^tree_sum: the axis must be 0 or -1, got 1\."):
    rows.tree_sum(np.ones((2, 3, 4), np.float32), axis=1)


@pytest.mark.parametrize("signs", [[-0.0], [-0.0] * 3, [-0.0] * 4, [-0.0, 0.0], [1.0, -1.0, -0.0]])
def test_a_zero_sum_is_positive(signs):
  x = np.array([signs], np.float32)
  for y in (rows.tree_sum(x), rows.tree_sum(jnp.asarray(x)), jax.jit(rows.tree_sum)(x)):
    np.testing.assert_array_equal(np.asarray(y).view(np.uint32), 0)


# Row, softmax, logsumexp.
EXCEPTIONAL = [
  ([-INF, -INF, -INF], [np.nan] * 3, -INF),
  ([-INF], [np.nan], -INF),
  ([INF, 0.0, -INF], [np.nan] * 3, INF),
  ([INF, INF], [np.nan] * 2, INF),
  ([np.nan, 0.0, -INF], [np.nan] * 3, np.nan),
  ([0.0, -INF, -88.0], [1.0, 0.0, 0.0], 0.0),
  ([1e38, -1e38], [1.0, 0.0], 1e38),
]


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["numpy", "jit"])
@pytest.mark.parametrize(("row", "softmax", "logsumexp"), EXCEPTIONAL)
def test_exceptional_rows(run, row, softmax, logsumexp):
  row = np.array(row, np.float32)
  for function, expected in ((rows.softmax, softmax), (rows.logsumexp, logsumexp)):
    expected = np.array(expected, np.float32)
    expected = np.where(np.isnan(expected), NAN_BITS, expected.view(np.uint32))
    np.testing.assert_array_equal(np.asarray(run(function)(row)).view(np.uint32), expected)
  assert (np.isnan(run(rows.log_softmax)(row)) == np.isnan(softmax)).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e17])
def test_rms_norm_at_extreme_scales(scale):
  x, weight = sample(20, 64)
  x = x * np.float32(scale)
  assert_same_bits(jitted(x, weight)[4:], every(x, weight)[4:], names=NAMES[4:])
  exact = x.astype(np.float64)
  exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPS)
  assert relative_error(rows.rms_norm(x, eps=EPS), exact).max() <= 8


FUNCTIONS = (
  rows.tree_sum,
  rows.softmax,
  rows.logsumexp,
  rows.log_softmax,
  functools.partial(rows.rms_norm, eps=EPS),
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_input_is_refused(function):
  name = getattr(function, "func", function).__name__
  with pytest.raises(TypeError, match=f"^{name}: expected a float32 array, got float64"):
    function(np.ones((2, 3)))
  for shape in ((), (0,), (3, 0)):
    with pytest.raises(ValueError, match=f"^{name}: expected rows"):
      function(np.ones(shape, np.float32))


def test_a_bad_weight_is_refused():
  with pytest.raises(TypeError, match=r"^rms_norm: weight: expected a float32 array"):
    rows.rms_norm(np.ones((2, 3), np.float32), np.ones(3), eps=EPS)
