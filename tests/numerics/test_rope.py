"""Rotary embedding: tables against FP64 scalars, rotations against loops, in every program."""

import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.numerics import rope

NAMES = ("rotate_half", "rotate_interleaved", "inverse")


def every(x, cos, sin):
  return (
    rope.rotate_half(x, cos, sin),
    rope.rotate_interleaved(x, cos, sin),
    rope.rotate_interleaved(x, cos, sin, inverse=True),
  )


def mapped(x, cos, sin):
  """Each leading index by itself, in a loop."""
  return lax.map(lambda part: every(part, cos, sin), x)


def mapped_over_time(x, cos, sin):
  """Each position by itself, as decoding sees it."""
  step = lambda row: every(row[0][:, None], row[1][None], row[2][None])
  results = lax.map(step, (jnp.swapaxes(x, 0, 1), cos, sin))
  return tuple(jnp.swapaxes(y[:, :, 0], 0, 1) for y in results)


def closed_over(*arguments):
  """The arguments as constants of the program, for the compiler to fold."""
  return jax.jit(lambda: every(*(jnp.asarray(a) for a in arguments)))()


def tables_closed_over(x, cos, sin):
  return jax.jit(lambda x: every(x, cos, sin))(x)


RUNS = {
  "eager": lambda *arguments: every(*(jnp.asarray(a) for a in arguments)),
  "jit": jax.jit(every),
  "vmap": lambda x, cos, sin: jax.vmap(every, (0, None, None))(jnp.asarray(x), cos, sin),
  "jit_vmap": jax.jit(jax.vmap(every, (0, None, None))),
  "jit_vmap_over_time": jax.jit(jax.vmap(every, (1, 0, 0), 1)),
  "map": jax.jit(mapped),
  "map_over_time": jax.jit(mapped_over_time),
  "closed_over": closed_over,
  "tables_closed_over": tables_closed_over,
}


def assert_same_bits(actual, expected):
  for name, a, e in zip(NAMES, actual, expected, strict=True):
    a, e = (np.asarray(v).view(np.uint32) for v in (a, e))
    np.testing.assert_array_equal(a, e, err_msg=name)


def sample(heads, time, dim):
  """x [heads, time, dim] and tables [time, dim / 2] for scattered positions."""
  rng = np.random.default_rng([heads, time, dim])
  x = rng.normal(size=(heads, time, dim)).astype(np.float32)
  positions = rng.integers(0, 1 << 20, time)
  return x, *rope.rope_tables(positions, rope.inverse_frequencies(dim, 1e4))


@pytest.mark.parametrize("run", RUNS)
def test_every_program_gives_the_bits_of_numpy(run):
  arguments = sample(19, 37, 26)
  assert_same_bits(RUNS[run](*arguments), every(*arguments))


@pytest.mark.parametrize("length", [*range(1, 71), 1000])
def test_no_length_changes_a_bit(length):
  """Of time, and of the rotated width."""
  for arguments in (sample(9, length, 6), sample(9, 5, 2 * length)):
    assert_same_bits(RUNS["jit"](*arguments), every(*arguments))


def test_no_batch_changes_a_bit():
  x, cos, sin = sample(720, 3, 10)
  expected = every(x, cos, sin)
  for batch in (720, 64, 3, 1):
    actual = RUNS["jit"](x[-batch:], cos, sin)
    assert_same_bits(actual, [y[-batch:] for y in expected])


@pytest.mark.parametrize("run", ["eager", "jit"])
def test_tables_may_have_leading_axes_and_x_may_have_none(run):
  x, cos, sin = sample(6, 5, 8)
  cos_BxHxTxC, sin_BxHxTxC = (
    np.stack([table, table[::-1]])[:, None] for table in (cos, sin)
  )  # positions of two lanes, for every head
  x_BxHxTxC = x.reshape(2, 3, 5, 8)
  expected = [every(x_BxHxTxC[i], cos_BxHxTxC[i, 0], sin_BxHxTxC[i, 0]) for i in range(2)]
  actual = RUNS[run](x_BxHxTxC, cos_BxHxTxC, sin_BxHxTxC)
  assert_same_bits(actual, [np.stack(pair) for pair in zip(*expected)])
  actual = RUNS[run](x[0], cos, sin)
  assert_same_bits(actual, [y[0] for y in every(x, cos, sin)])


def turn(first, second, cos, sin):
  """One pair of float32 scalars, every operation rounded."""
  return first * cos - second * sin, second * cos + first * sin


@pytest.mark.parametrize("dim", [2, 6, 10, 64])
def test_scalar_loops_give_the_same_bits(dim):
  x, cos, sin = sample(3, 7, dim)
  half, interleaved, inverse = (np.empty_like(x) for _ in range(3))
  for h, t, i in np.ndindex(3, 7, dim // 2):
    row, c, s = x[h, t], cos[t, i], sin[t, i]
    a, b = i, i + dim // 2
    half[h, t, a], half[h, t, b] = turn(row[a], row[b], c, s)
    a, b = 2 * i, 2 * i + 1
    interleaved[h, t, a], interleaved[h, t, b] = turn(row[a], row[b], c, s)
    inverse[h, t, a], inverse[h, t, b] = turn(row[a], row[b], c, -s)
  assert_same_bits(every(x, cos, sin), (half, interleaved, inverse))


def test_rotations_are_those_of_complex_numbers():
  x, cos, sin = sample(5, 40, 16)
  exact = x.astype(np.float64)
  turns = cos.astype(np.float64) + 1j * sin.astype(np.float64)
  half, interleaved, inverse = every(x, cos, sin)
  for actual, first, second, by in (
    (half, slice(0, 8), slice(8, 16), turns),
    (interleaved, slice(0, 16, 2), slice(1, 16, 2), turns),
    (inverse, slice(0, 16, 2), slice(1, 16, 2), turns.conj()),
  ):
    expected = (exact[..., first] + 1j * exact[..., second]) * by
    actual = actual[..., first] + 1j * actual[..., second].astype(np.float64)
    assert (np.abs(actual - expected) <= 2.0**-23 * np.abs(expected)).all()


def test_the_inverse_undoes_the_rotation():
  x, cos, sin = sample(5, 40, 16)
  back = rope.rotate_interleaved(rope.rotate_interleaved(x, cos, sin), cos, sin, inverse=True)
  np.testing.assert_allclose(back, x, rtol=0, atol=1e-6)


def test_position_zero_turns_nothing():
  x, _, _ = sample(5, 1, 16)
  tables = rope.rope_tables(np.array([0]), rope.inverse_frequencies(16, 1e4))
  assert_same_bits(every(x, *tables), (x, x, x))


@pytest.mark.parametrize(("dim", "theta"), [(2, 1e4), (64, 160000.0), (128, 1e6), (14, 10)])
def test_inverse_frequencies(dim, theta):
  actual = rope.inverse_frequencies(dim, theta)
  expected = [math.exp(-2 * i / dim * math.log(theta)) for i in range(dim // 2)]
  assert actual.dtype == np.float32 and actual[0] == 1
  np.testing.assert_allclose(actual, expected, rtol=2.0**-24)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_tables_are_the_cosines_of_float32_angles(theta):
  frequencies = rope.inverse_frequencies(64, theta)
  positions = np.array([0, 1, 2, 5, 100, 4095, 65535, 999_983, 1 << 24])
  cos, sin = rope.rope_tables(positions, frequencies)
  assert cos.shape == sin.shape == (9, 32) and cos.dtype == sin.dtype == np.float32
  for t, i in np.ndindex(9, 32):
    angle = float(np.float32(positions[t]) * frequencies[i])
    assert cos[t, i] == np.float32(math.cos(angle))
    assert sin[t, i] == np.float32(math.sin(angle))


def test_a_table_does_not_depend_on_the_positions_beside_it():
  frequencies = rope.inverse_frequencies(10, 1e4)
  whole = rope.rope_tables(np.arange(200), frequencies)
  for t in range(200):
    one = rope.rope_tables([t], frequencies)
    for a, e in zip(one, whole):
      np.testing.assert_array_equal(a[0].view(np.uint32), e[t].view(np.uint32))


@pytest.mark.parametrize("dim", [0, -2, 7])
def test_odd_widths_are_refused(dim):
  with pytest.raises(ValueError, match="dim: expected a positive even number"):
    rope.inverse_frequencies(dim, 1e4)


@pytest.mark.parametrize("positions", [[-1], [0, (1 << 24) + 1], [0.5], [[0]], 0])
def test_bad_positions_are_refused(positions):
  with pytest.raises(ValueError, match="positions: expected"):
    rope.rope_tables(positions, rope.inverse_frequencies(4, 1e4))


def test_frequencies_must_be_float32():
  with pytest.raises(TypeError, match="inverse_frequencies: expected a float32 array"):
    rope.rope_tables([0], np.ones(2))


@pytest.mark.parametrize("rotate", [rope.rotate_half, rope.rotate_interleaved])
def test_bad_operands_are_refused(rotate):
  x, cos, sin = sample(1, 3, 8)
  with pytest.raises(ValueError, match="x, cos, sin: expected"):
    rotate(x[..., :6], cos, sin)
  with pytest.raises(ValueError, match="x, cos, sin: expected"):
    rotate(x, cos, sin[:1])
  for name, operands in (
    ("x", (x.astype(np.float64), cos, sin)),
    ("cos", (x, cos.astype(np.float64), sin)),
    ("sin", (x, cos, sin.astype(np.float64))),
  ):
    with pytest.raises(TypeError, match=f"{name}: expected a float32 array"):
      rotate(*operands)
