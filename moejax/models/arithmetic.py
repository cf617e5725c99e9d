"""The one numeric seam of the models: every product, sum and rounding goes through here.

`Canonical` has the bit contract of `moejax.numerics`: a token's result does not depend on what is
computed beside it. `Fast` is plain XLA, differentiable, for training and for comparison; its bits
depend on shapes. Both keep activations as float32 arrays, of BF16 values wherever the model rounds.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax import numerics
from moejax.models.execution import Mode
from moejax.numerics.backend import XlaBackend


class Canonical:
  """Canonical arithmetic: inference only."""

  exp = staticmethod(numerics.exp)
  sigmoid = staticmethod(numerics.sigmoid)
  silu = staticmethod(numerics.silu)
  softmax = staticmethod(numerics.softmax)
  softplus = staticmethod(numerics.softplus)
  sqrt_softplus = staticmethod(numerics.sqrt_softplus)
  log_softmax = staticmethod(numerics.log_softmax)
  divide = staticmethod(XlaBackend.divide)
  # `numerics.round_bf16` of everything but NaN, in one operation: models compile a quarter faster.
  round = staticmethod(functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7))
  hold = staticmethod(lax.optimization_barrier)

  @staticmethod
  def multiply(x, y):
    """x · y, rounded to float32 whatever is done with it."""
    return XlaBackend.fence(x * y)

  @staticmethod
  def sum(x):
    """[..., N] → [...]."""
    return numerics.tree_sum(x)

  @staticmethod
  def root_mean_square(x, eps):
    """√(mean(x²) + eps): [..., N] → [..., 1]."""
    return numerics.root_mean_square(x, eps=eps)

  @staticmethod
  def normalize(x, eps):
    """x / √(mean(x²) + eps)."""
    return numerics.rms_norm(x, eps=eps)

  @staticmethod
  def matmul(x, w):
    """[..., K] × [K, N]; x holds BF16 values."""
    return numerics.dot(x.astype(jnp.bfloat16), w)

  @staticmethod
  def matmul_transposed(x, w):
    """[..., K] × [N, K]."""
    rows = x.astype(jnp.bfloat16).reshape(-1, x.shape[-1])
    return numerics.batched_dot(rows, w, transposed=True).reshape(*x.shape[:-1], w.shape[0])

  @staticmethod
  def matmul_f32(x, w):
    """[..., K] × [K, N], both rounded to nothing less than float32."""
    return numerics.dot_f32(x, w.astype(jnp.float32))

  @staticmethod
  def batched(a, w, lengths=None, *, transposed=False):
    """`numerics.batched_dot`; both operands hold BF16 values."""
    return numerics.batched_dot(
      a.astype(jnp.bfloat16), w.astype(jnp.bfloat16), lengths, transposed=transposed
    )

  @staticmethod
  def grouped(x, w, ids):
    """[N, K] or [N, S, K] rows times the matrix [E, K, M] of their expert; ids [N, S]."""
    return numerics.grouped_dot(x.astype(jnp.bfloat16), w, ids)


@jax.custom_jvp
def _round_straight_through(x):
  return Canonical.round(x)


@_round_straight_through.defjvp
def _(primals, tangents):
  return _round_straight_through(primals[0]), tangents[0]


class Fast:
  """Plain XLA. With `rounding`, BF16 roundings where the model has them, straight-through."""

  exp = staticmethod(jnp.exp)
  sigmoid = staticmethod(jax.nn.sigmoid)
  silu = staticmethod(jax.nn.silu)
  softmax = staticmethod(jax.nn.softmax)
  softplus = staticmethod(jax.nn.softplus)
  log_softmax = staticmethod(jax.nn.log_softmax)
  hold = staticmethod(lax.optimization_barrier)

  def __init__(self, rounding: bool):
    self._rounding = rounding

  def round(self, x):
    return _round_straight_through(x) if self._rounding else x

  @staticmethod
  def sqrt_softplus(x):
    return jnp.sqrt(jax.nn.softplus(x))

  @staticmethod
  def divide(x, s):
    return x / jnp.broadcast_to(s, x.shape)

  @staticmethod
  def multiply(x, y):
    return x * y

  @staticmethod
  def sum(x):
    return x.sum(axis=-1)

  @staticmethod
  def root_mean_square(x, eps):
    return jnp.sqrt(jnp.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))

  @classmethod
  def normalize(cls, x, eps):
    return x / cls.root_mean_square(x, eps)

  def _operands(self, x, w):
    """Both in BF16 if that loses nothing, which is faster; else both in float32."""
    if self._rounding and w.dtype == jnp.bfloat16:
      return x.astype(jnp.bfloat16), w
    return x, self.round(w.astype(jnp.float32))

  def _einsum(self, equation, x, w):
    x, w = self._operands(x, w)
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32)

  def matmul(self, x, w):
    return self._einsum("...k,kn->...n", x, w)

  def matmul_transposed(self, x, w):
    return self._einsum("...k,nk->...n", x, w)

  @staticmethod
  def matmul_f32(x, w):
    return x @ w.astype(jnp.float32)

  def batched(self, a, w, lengths=None, *, transposed=False):
    del lengths  # entries beyond them meet probabilities of zero, or are masked after
    return self._einsum("...mk,...nk->...mn" if transposed else "...mk,...kn->...mn", a, w)

  def grouped(self, x, w, ids):
    """As `Canonical.grouped`: gathers matrices for few rows, fills buckets of rows for many."""
    x = jnp.broadcast_to(x[:, None] if x.ndim == 2 else x, (*ids.shape, x.shape[-1]))
    num_experts = w.shape[0]
    if ids.size <= num_experts:
      safe = jnp.clip(ids, 0, num_experts - 1)
      out = self._einsum("tsk,tskn->tsn", x, w[safe])
    else:
      out = self._bucketed(x, w, ids)
    chosen = (ids >= 0) & (ids < num_experts)
    return jnp.where(chosen[..., None], out, np.float32(0))

  def _bucketed(self, x, w, ids):
    num_rows, num_experts = ids.size, w.shape[0]
    rows, flat = x.reshape(num_rows, -1), ids.reshape(num_rows)
    by_expert = jnp.argsort(flat, stable=True)
    counts = (flat[:, None] == jnp.arange(num_experts, dtype=ids.dtype)[None]).sum(axis=0)
    starts = jnp.cumsum(counts) - counts
    unchosen = (flat < 0).sum()
    place = jnp.argsort(by_expert) - unchosen - starts[jnp.clip(flat, 0, num_experts - 1)]

    def run(capacity):
      at = unchosen + starts[:, None] + jnp.arange(capacity, dtype=starts.dtype)[None]
      bucket = rows[by_expert[jnp.minimum(at, num_rows - 1)]]
      out = self._einsum("eck,ekn->ecn", bucket, w).reshape(num_experts * capacity, -1)
      return out[jnp.clip(flat * capacity + place, 0, num_experts * capacity - 1)]

    # Half as many again as evenly spread experts need; if one expert needs more, room for all.
    even = -(-3 * num_rows // (2 * num_experts))
    capacity = min(num_rows, -(-even // 8) * 8)
    out = lax.cond(counts.max() <= capacity, lambda: run(capacity), lambda: run(x.shape[0]))
    return out.reshape(*ids.shape, -1)


def arithmetic(mode: Mode) -> Canonical | Fast:
  """The arithmetic of a mode."""
  return Canonical() if mode.arithmetic == "canonical" else Fast(mode.rounding != "float32")
