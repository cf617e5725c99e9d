"""Elementwise functions: the same bits in every kind of program, and their error against FP64."""

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.numerics import elementwise

NAN_BITS = np.uint32(0x7FC00000)
NANS = np.array([NAN_BITS, 0xFFC00000, 0x7FC12345, 0xFFFFFFFF], np.uint32).view(np.float32)
INF = np.inf

FUNCTIONS = (
  elementwise.exp,
  elementwise.log,
  elementwise.log1p,
  elementwise.sigmoid,
  elementwise.silu,
  elementwise.softplus,
  elementwise.sqrt_softplus,
)


def every(x):
  return tuple(f(x) for f in FUNCTIONS)


def mapped(x):
  """Each row by itself, in a loop."""
  return lax.map(every, x)


def one_by_one(x):
  return tuple(y.reshape(x.shape) for y in lax.map(every, x.reshape(-1)))


def closed_over(x):
  """The argument as a constant of the program, for the compiler to fold."""
  return jax.jit(lambda: every(jnp.asarray(x)))()


RUNS = {
  "eager": lambda x: every(jnp.asarray(x)),
  "jit": jax.jit(every),
  "jit_row": lambda x: tuple(y.reshape(x.shape) for y in jax.jit(every)(x.reshape(-1))),
  "vmap": lambda x: jax.vmap(every)(jnp.asarray(x)),
  "jit_vmap": jax.jit(jax.vmap(every, in_axes=1, out_axes=1)),
  "map": jax.jit(mapped),
  "one_by_one": jax.jit(one_by_one),
  "closed_over": closed_over,
}


def assert_same_bits(actual, expected, note=""):
  for function, a, e in zip(FUNCTIONS, actual, expected, strict=True):
    a, e = (np.asarray(v).view(np.uint32) for v in (a, e))
    np.testing.assert_array_equal(a, e, err_msg=f"{function.__name__} {note}")


def from_bits(start, stop, step=1):
  return np.arange(start, stop, step, dtype=np.uint32).view(np.float32)


def sample(count, seed=0):
  """float32 [count]: special values, then half on a linear and half on a logarithmic scale.

  All in the domain: nothing below 2^-125, where the result of silu would be subnormal.
  """
  rng = np.random.default_rng(seed)
  special = np.array([0.0, -0.0, INF, -INF, 1, -1, 88.7228, 88.7229, -87, -87.1, -174, 3.4e38])
  linear = rng.uniform(-110, 100, count)
  logarithmic = rng.choice([-1, 1], count) * 2.0 ** rng.uniform(-124, 127, count)
  mixed = np.where(rng.random(count) < 0.5, linear, logarithmic)
  numbers = np.concatenate([special, mixed]).astype(np.float32)
  return np.concatenate([NANS, numbers])[:count]


@pytest.mark.parametrize("run", RUNS)
def test_every_program_gives_the_bits_of_numpy(run):
  x = sample(97 * 53).reshape(97, 53)
  assert_same_bits(RUNS[run](x), every(x))


@pytest.mark.parametrize("length", [*range(1, 71), 1000])
def test_no_length_changes_a_bit(length):
  # A loop over rows: its kernel has this length, and many values pass through it.
  x = sample(4000, seed=length)
  x = x[: 4000 // length * length].reshape(-1, length)
  assert_same_bits(jax.jit(mapped)(x), every(x))


@pytest.mark.parametrize("run", ["eager", "jit"])
@pytest.mark.parametrize("shape", [(), (0,), (13,), (2, 3, 5)])
def test_no_shape_changes_a_bit(run, shape):
  x = sample(200)[200 - np.prod(shape, dtype=int) :].reshape(shape)
  results = RUNS[run](x)
  assert_same_bits(results, every(x))
  assert all(y.shape == shape and y.dtype == np.float32 for y in (*results, *every(x)))


@pytest.mark.parametrize("shape", [(500, 1), (1, 500)])
def test_a_broadcast_inside_the_program_changes_no_bit(shape):
  x = sample(500).reshape(shape)
  broadcast = jax.jit(lambda x: every(jnp.broadcast_to(x, (500, 500))))(x)
  assert_same_bits(broadcast, every(np.broadcast_to(x, (500, 500))))


jitted = jax.jit(every)

floats = st.floats(width=32, allow_subnormal=False).map(lambda v: v if abs(v) >= 2**-125 else 0.0)


@hypothesis.settings(deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(floats, min_size=8, max_size=8))
def test_any_floats_have_the_bits_of_numpy(values):
  x = np.array(values, np.float32)
  assert_same_bits(jitted(x), every(x))


def sigmoid_oracle(x):
  return np.where(x >= 0, 1.0, np.exp(np.minimum(x, 0))) / (1 + np.exp(-np.abs(x)))


def softplus_oracle(x):
  return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


# Name, FP64 oracle, interval of the argument, bound in ulps, worst argument found.
ACCURACY = [
  ("exp", np.exp, (-87, 88.72283), 1.0, -5.1980495),
  ("log", np.log, (1.2e-38, 3.4e38), 0.9, 0.69991034),
  ("log1p", np.log1p, (-1 + 2**-24, 3.4e38), 0.9, 0.41251197),
  ("sigmoid", sigmoid_oracle, (-87, 200), 2.5, -5.542755),
  ("silu", lambda x: x * sigmoid_oracle(x), (-87, 200), 3.2, -6.763165),
  ("softplus", softplus_oracle, (-87, 200), 1.7, -1.2648917),
  ("sqrt_softplus", lambda x: np.sqrt(softplus_oracle(x)), (-174, 200), 1.4, 0.34022108),
]


def ulps(actual, exact):
  return np.abs(actual - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize(("name", "oracle", "interval", "bound", "worst"), ACCURACY)
def test_error_is_within_the_stated_bound(name, oracle, interval, bound, worst):
  low, high = (np.float32(end) for end in interval)
  grids = [from_bits(0x00800000 * 2, 0x7F800000, 8191), np.linspace(low, min(high, 200), 200_003)]
  x = np.concatenate([grids[0], -grids[0], grids[1].astype(np.float32), [np.float32(worst)]])
  x = x[(x >= low) & (x <= high)]
  errors = ulps(getattr(elementwise, name)(x), oracle(x.astype(np.float64)))
  assert errors.max() <= bound
  assert errors[-1] > 0.9 * bound, "the bound is loose"


def test_exp_is_right_up_to_the_overflow_threshold():
  x = from_bits(0x42B17218 - 4000, 0x42B17218 + 4000)  # 88.72284 is the first to overflow
  y = elementwise.exp(x)
  exact = np.exp(x.astype(np.float64))
  finite = x < from_bits(0x42B17218, 0x42B17219)
  assert (y[~finite] == INF).all()
  assert ulps(y[finite], exact[finite]).max() <= 1.0
  assert exact[~finite].min() > 2.0**128 - 2.0**103 > exact[finite].max()


def test_sqrt_softplus_survives_where_softplus_would_be_subnormal():
  x = np.append(np.linspace(-174, -80, 50_001), -104).astype(np.float32)
  for run in (elementwise.sqrt_softplus, jax.jit(elementwise.sqrt_softplus)):
    y = np.asarray(run(x))
    assert ulps(y, np.exp(x.astype(np.float64) / 2)).max() <= 1.4
    assert y[-1] == pytest.approx(2.6e-23, rel=0.01)


def test_sqrt_softplus_is_as_accurate_on_both_sides_of_its_switch():
  x = -from_bits(0x41A00000 - 20_000, 0x41A00000 + 20_000)  # around -20
  exact = np.sqrt(softplus_oracle(x.astype(np.float64)))
  assert ulps(elementwise.sqrt_softplus(x), exact).max() <= 1.4


SPECIAL = {
  "exp": [(-INF, 0.0), (-87.00001, 0.0), (0.0, 1.0), (-0.0, 1.0), (88.72284, INF), (INF, INF)],
  "log": [
    (0.0, -INF), (-0.0, -INF), (1e-40, -INF), (-1e-40, -INF), (1.0, 0.0), (INF, INF),
    (-1.0, np.nan), (-1.2e-38, np.nan), (-INF, np.nan),
  ],
  "log1p": [
    (0.0, 0.0), (-0.0, 0.0), (1.2e-38, 1.2e-38), (-1.0, -INF), (INF, INF),
    (-1.0000001, np.nan), (-INF, np.nan),
  ],
  "sigmoid": [(-INF, 0.0), (-87.00001, 0.0), (0.0, 0.5), (-0.0, 0.5), (INF, 1.0)],
  "silu": [(-INF, -0.0), (-87.00001, -0.0), (0.0, 0.0), (-0.0, -0.0), (INF, INF)],
  "softplus": [(-INF, 0.0), (-87.00001, 0.0), (0.0, np.log(2)), (200.0, 200.0), (INF, INF)],
  "sqrt_softplus": [(-INF, 0.0), (-174.1, 0.0), (196.0, 14.0), (INF, INF)],
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_special_values(function):
  x, expected = (np.array(v, np.float32) for v in zip(*SPECIAL[function.__name__]))
  expected = np.where(np.isnan(expected), NAN_BITS, expected.view(np.uint32))
  for run in (function, jax.jit(function)):
    np.testing.assert_array_equal(np.asarray(run(x)).view(np.uint32), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_nan_gives_the_same_nan(function):
  np.testing.assert_array_equal(function(NANS).view(np.uint32), NAN_BITS)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("x", [1.0, np.float64(1), np.ones(3, np.float16), np.arange(3)])
def test_other_dtypes_are_refused(function, x):
  with pytest.raises(TypeError, match=f"^{function.__name__}: expected a float32 array"):
    function(x)
