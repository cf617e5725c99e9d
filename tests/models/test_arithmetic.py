"""The two arithmetics: canonical rounding, and what fast arithmetic may differ by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import numerics
from moejax.models import Execution, Mode, Taps
from moejax.models.arithmetic import arithmetic, Canonical, Fast
from tests.models import tiny
from tests.oracles import assert_same_bits, to_bf16

HIGH = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
LOW = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)


def normal(seed, *shape):
  """float32 of BF16 values."""
  return to_bf16(np.random.default_rng(seed).standard_normal(shape))


# Rounding.


def test_canonical_round_is_round_bf16():
  """Every high half with low halves around a tie; the payload of a NaN is nobody's business."""
  x = (HIGH[:, None] | LOW).view(np.float32)
  expected = numerics.round_bf16(x)
  assert_same_bits(Canonical.round(jnp.asarray(x)), expected)
  assert_same_bits(jax.jit(Canonical.round)(x), expected)


def test_fast_rounds_as_canonical_and_passes_gradients_through():
  x = np.random.default_rng(0).standard_normal(100, np.float32)
  c = np.random.default_rng(1).standard_normal(100, np.float32)
  fast = Fast(rounding=True)
  assert_same_bits(fast.round(jnp.asarray(x)), to_bf16(x))
  loss = lambda x: (fast.round(x) * c).sum()
  assert_same_bits(jax.grad(loss)(jnp.asarray(x)), c)
  assert_same_bits(jax.jit(jax.grad(loss))(x), c)
  tangent = jax.jvp(fast.round, (jnp.asarray(x),), (jnp.asarray(c),))[1]
  assert_same_bits(tangent, c)
  assert_same_bits(Fast(rounding=False).round(jnp.asarray(x)), x)


def test_arithmetic_of_a_mode():
  x = jnp.float32(1.001)
  assert isinstance(arithmetic(Mode()), Canonical)
  assert arithmetic(Mode("fast")).round(x) != x
  assert arithmetic(Mode("fast", "float32")).round(x) == x


# Products.


def assert_close_as_sums(fast, canonical, magnitudes, terms):
  """Both are sums of `terms` exact products in float32, in different orders.

  Any order is off by at most n · 2^-24 · Σ|products| to first order, so two are by twice that.
  """
  bound = 2 * terms * 2.0**-24 * np.asarray(magnitudes, np.float64)
  error = np.abs(np.asarray(fast, np.float64) - np.asarray(canonical, np.float64))
  assert (error <= bound).all()


def test_fast_matmul():
  x, w = normal(0, 3, 5, 67), normal(1, 67, 29)
  bf16 = jnp.asarray(w, jnp.bfloat16)
  fast = Fast(rounding=True)
  magnitudes = np.abs(x) @ np.abs(w)
  canonical = Canonical.matmul(jnp.asarray(x), bf16)
  assert_close_as_sums(fast.matmul(jnp.asarray(x), bf16), canonical, magnitudes, 67)
  plain = Fast(rounding=False).matmul(jnp.asarray(x), jnp.asarray(w))
  assert_close_as_sums(plain, canonical, magnitudes, 67)
  turned = fast.matmul_transposed(jnp.asarray(x), bf16.T)
  assert_close_as_sums(turned, Canonical.matmul_transposed(jnp.asarray(x), bf16.T), magnitudes, 67)
  f32 = Fast.matmul_f32(jnp.asarray(x), jnp.asarray(w))
  assert_close_as_sums(f32, Canonical.matmul_f32(jnp.asarray(x), jnp.asarray(w)), magnitudes, 67)


@pytest.mark.parametrize("transposed", [False, True])
def test_fast_batched(transposed):
  a, w = normal(2, 2, 3, 7, 41), normal(3, 2, 3, 41, 11)
  magnitudes = np.abs(a) @ np.abs(w)
  w = jnp.asarray(np.swapaxes(w, -1, -2) if transposed else w)
  fast, canonical = (
    ops.batched(jnp.asarray(a), w, transposed=transposed) for ops in (Fast(True), Canonical)
  )
  assert_close_as_sums(fast, canonical, magnitudes, 41)


_fast_grouped = jax.jit(Fast(rounding=True).grouped)


def grouped(ids, wide=False):
  """Fast against canonical for ids [N, S]; a row is shared by its S slots unless `wide`."""
  ids = np.asarray(ids, np.int32)
  x = normal(4, *(ids.shape if wide else ids.shape[:1]), 37)
  w = normal(5, 6, 37, 13)
  rows = x if wide else np.broadcast_to(x[:, None], (*ids.shape, 37))
  magnitudes = np.einsum("nsk,nskm->nsm", np.abs(rows), np.abs(w)[np.clip(ids, 0, 5)])
  operands = (jnp.asarray(x), jnp.asarray(w, jnp.bfloat16), jnp.asarray(ids))
  fast, canonical = _fast_grouped(*operands), Canonical.grouped(*operands)
  assert (np.asarray(fast)[ids < 0] == 0).all()
  assert_close_as_sums(fast, canonical, magnitudes, 37)


def distinct(rows, seed):
  """int32 [rows, 3] of six experts."""
  return np.argsort(np.random.default_rng(seed).random((rows, 6)))[:, :3]


@pytest.mark.parametrize("wide", [False, True])
def test_fast_grouped(wide):
  """Of six experts: matrices are gathered for up to six slots, rows put in buckets beyond."""
  grouped(distinct(2, seed=0), wide)
  grouped([[-1, 2, 5]], wide)
  even, padded, crowded = distinct(40, seed=1), distinct(40, seed=2), distinct(40, seed=3)
  assert np.bincount(even.ravel()).max() <= 32  # 1.5 times 20, in steps of 8
  grouped(even, wide)
  padded[11:] = -1
  grouped(padded, wide)
  crowded[:, 2] = np.where((crowded[:, :2] == 4).any(1), crowded[:, 2], 4)
  assert np.bincount(crowded.ravel())[4] == 40  # more than a bucket holds
  grouped(crowded, wide)


# Gradients.


def nll(model, tokens, mode, params, expert_mask):
  """(mean negative log-likelihood of tokens[:, 1:], chosen ids)."""
  state = model.module.init_state(len(tokens), tokens.shape[1], mode)
  execution, taps = Execution(expert_mask=expert_mask), Taps(ids=True)
  logits, _, trace = model.module.apply(params, tokens, state, execution, mode=mode, taps=taps)
  scores = jax.nn.log_softmax(logits[:, :-1])
  picked = jnp.take_along_axis(scores, jnp.asarray(tokens)[:, 1:, None], axis=-1)
  return -picked.mean(), trace["ids"]


def test_gradient_of_fast_arithmetic():
  """Against central differences along the gradient, one parameter at a time.

  Each token is left no experts but its own, so that no step changes a choice.
  """
  model, tokens, mode = tiny.tiny("olmoe"), tiny.draw_tokens(2, 11), Mode("fast", "float32")
  params, every = tiny.draw(model.config, "float32"), np.arange(model.config.num_experts)
  loss = functools.partial(nll, model, tokens, mode)
  value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, ids), grads = value_and_grad(params, jnp.ones((2, 2, 11, len(every)), bool))
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
  mask = jnp.asarray((np.asarray(ids)[..., None] == every).any(axis=-2))
  names = ("attention.q", "attention.k_norm", "moe.router", "moe.experts.gate_up", "ffn_norm")
  for path in (f"layers_{layer}.{name}" for layer in range(2) for name in names):
    grad = np.asarray(
      functools.reduce(lambda node, key: node[key], path.split("."), grads["params"])
    )
    step = grad * np.float32(0.004 / np.square(grad, dtype=np.float64).sum())
    ahead, behind = (
      float(value_and_grad(moved(model, params, path, sign * step), mask)[0][0]) for sign in (1, -1)
    )
    # The loss is near 5, so each has an error of about 2^-20; the step leaves 0.4 % of curvature.
    assert (ahead - behind) / 2 == pytest.approx(0.004, rel=0.01), path


def moved(model, params, path, step):
  """params with a step added to one of them."""
  change = lambda at, x: x + step if at == path else x
  return tiny.with_params(dataclasses.replace(model, params=params), change).params


# Fingerprints.


def same(a, b):
  return (np.asarray(numerics.fingerprint(a)) == np.asarray(numerics.fingerprint(b))).all()


@pytest.mark.parametrize("width", [1, 7, 1024, 1025, 131072 + 3])
def test_fingerprints_of_vectors(width):
  x = np.random.default_rng(7).standard_normal((2, width), np.float32)
  prints = jax.jit(numerics.fingerprint)
  want = np.asarray(prints(x))
  assert want.shape == (2, 4) and want.dtype == np.uint32
  np.testing.assert_array_equal(prints(x[::-1].copy()), want[::-1])
  rng = np.random.default_rng(8)
  for column in {0, width - 1, *rng.integers(0, width, 20).tolist()}:
    flipped = x.view(np.uint32).copy()
    flipped[0, column] ^= np.uint32(1) << np.uint32(rng.integers(0, 32))
    found = np.asarray(prints(flipped.view(np.float32)))
    assert (found[0] != want[0]).any() and (found[1] == want[1]).all()


def test_fingerprints_know_places_signs_and_widths_and_one_nan():
  x = np.arange(1, 9, dtype=np.float32)
  assert same(jnp.asarray(x), jnp.asarray(x))
  assert not same(jnp.asarray(x), jnp.asarray(x[[1, 0, *range(2, 8)]]))
  assert not same(jnp.zeros(3), -jnp.zeros(3))
  x[2] = np.nan
  other = x.copy()
  other.view(np.uint32)[2] = 0xFF812345
  assert np.isnan(other[2]) and same(jnp.asarray(x), jnp.asarray(other))
  with pytest.raises(TypeError, match="fingerprint"):
    numerics.fingerprint(jnp.ones(3, jnp.bfloat16))
