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
from moejax.models.grouped import grouped_product
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

  @classmethod
  def weighted_sum(cls, streams, weights):
    """Σ_i weights_ij · stream_i, i ascending: [B, T, n, D], [B, T, n, m] → [B, T, m, D]."""
    return _weighted_sum(cls.multiply, streams, weights)

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


def _weighted_sum(multiply, streams, weights):
  total = None
  shape = (*streams.shape[:2], weights.shape[-1], streams.shape[-1])
  for i in range(streams.shape[2]):
    weight = jnp.broadcast_to(weights[:, :, i, :, None], shape)
    term = multiply(weight, jnp.broadcast_to(streams[:, :, i, None], shape))
    total = term if total is None else total + term
  return total


@jax.custom_vjp
def _mix(streams, weights):
  return _weighted_sum(jnp.multiply, streams, weights)


def _mix_backward(residuals, grad):
  streams, weights = residuals
  grad_streams = _weighted_sum(jnp.multiply, grad, jnp.swapaxes(weights, -1, -2))
  return grad_streams, jnp.einsum("btid,btjd->btij", streams, grad)


# Left to itself, differentiation stores every broadcast factor.
_mix.defvjp(lambda streams, weights: (_mix(streams, weights), (streams, weights)), _mix_backward)


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
  weighted_sum = staticmethod(_mix)

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
    """As `Canonical.grouped`: gathers matrices for few rows, blocks of rows for many."""
    x, w = self._operands(x, w)
    if ids.size > w.shape[0]:
      return grouped_product(x, w, ids)
    x = jnp.broadcast_to(x[:, None] if x.ndim == 2 else x, (*ids.shape, x.shape[-1]))
    chosen = (ids >= 0) & (ids < w.shape[0])
    matrices = w[jnp.where(chosen, ids, 0)]
    out = jnp.einsum("tsk,tskn->tsn", x, matrices, preferred_element_type=jnp.float32)
    return jnp.where(chosen[..., None], out, np.float32(0))


def arithmetic(mode: Mode) -> Canonical | Fast:
  """The arithmetic of a mode."""
  return Canonical() if mode.arithmetic == "canonical" else Fast(mode.rounding != "float32")
