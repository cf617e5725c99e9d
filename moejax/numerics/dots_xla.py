"""The canonical dots in plain XLA: the same bits as the custom calls, without a compiler.

Each is a scan over k of rank-1 updates of an FP32 accumulator that starts from +0. XLA flushes
subnormals, the custom calls do not: the two agree on the documented domain (`dots`), where no
nonzero product or partial sum lies below 2^-126.
"""

import jax
from jax import lax
import jax.numpy as jnp

from moejax.numerics import backend

BLOCK = 256
# Measured: 1, 8 and 64 are 1.5 to 6 times slower at many rows.
_UNROLL = 16


def _fold(start, operands, update):
  """Folds `update(c, *operands_at_k)` over the leading axis of `operands`."""
  depth = operands[0].shape[0]
  if depth == 0:
    return start
  step = lambda c, at_k: (update(c, *at_k), None)
  return lax.scan(step, start, operands, unroll=min(_UNROLL, depth))[0]


def dot(a: jax.Array, w: jax.Array, blocked: bool) -> jax.Array:
  """[M, K] × [K, N] → float32 [M, N]; see `dots.dot`."""
  (m, k), n = a.shape, w.shape[1]
  a_KxM, w_KxN = a.T.astype(jnp.float32), w.astype(jnp.float32)  # exact widening
  zero = jnp.zeros((m, n), jnp.float32)
  update = lambda c, a_M, w_N: c + a_M[:, None] * w_N[None, :]  # exact product: FMA or not
  if not blocked or k <= BLOCK:
    return _fold(zero, (a_KxM, w_KxN), update)
  num_blocks = -(-k // BLOCK)
  pad = ((0, num_blocks * BLOCK - k), (0, 0))  # zeros at the end of a block change nothing
  blocks = (
    jnp.pad(a_KxM, pad).reshape(num_blocks, BLOCK, m),
    jnp.pad(w_KxN, pad).reshape(num_blocks, BLOCK, n),
  )
  return _fold(zero, blocks, lambda c, a_B, w_B: c + _fold(zero, (a_B, w_B), update))


def dot_f32(a: jax.Array, w: jax.Array) -> jax.Array:
  """[M, K] × [K, N] of float32: the product is rounded, then added; see `dots.dot_f32`."""
  fence = backend.XlaBackend.fence
  return _fold(
    jnp.zeros((a.shape[0], w.shape[1]), jnp.float32),
    (a.T, w),
    lambda c, a_M, w_N: c + fence(a_M[:, None] * w_N[None, :]),
  )


def batched_dot(a: jax.Array, w: jax.Array, lengths: jax.Array, transposed: bool) -> jax.Array:
  """[*B, M, K] × [*B, K, N] with lengths [*B, M]; see `dots.batched_dot`."""
  if transposed:
    w = jnp.swapaxes(w, -1, -2)
  a_K = jnp.moveaxis(a.astype(jnp.float32), -1, 0)  # [K, *B, M]
  w_K = jnp.moveaxis(w.astype(jnp.float32), -2, 0)  # [K, *B, N]
  zero = jnp.zeros((*a.shape[:-1], w.shape[-1]), jnp.float32)
  valid_M = lengths[..., None]

  def update(c, k, a_M, w_N):
    added = c + a_M[..., :, None] * w_N[..., None, :]
    # Selected, not multiplied by zero: whatever lies beyond, a NaN included, cannot reach the sum.
    return added if transposed else jnp.where(k < valid_M, added, c)

  out = _fold(zero, (jnp.arange(a.shape[-1], dtype=jnp.int32), a_K, w_K), update)
  if not transposed:
    return out
  column = lax.broadcasted_iota(jnp.int32, out.shape, out.ndim - 1)
  return jnp.where(column < valid_M, out, jnp.float32(0))


def grouped_dot(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
  """x [T, S or 1, K], w [E, K, N], ids [T, S] → [T, S, N]; see `dots.grouped_dot`."""
  num_experts = w.shape[0]
  known = (ids >= 0) & (ids < num_experts)
  safe_ids = jnp.where(known, ids, 0)
  x_K = jnp.moveaxis(x.astype(jnp.float32), -1, 0)  # [K, T, S or 1]
  w_K = jnp.swapaxes(w, 0, 1)  # [K, E, N]
  zero = jnp.zeros((*ids.shape, w.shape[-1]), jnp.float32)
  # One row of each chosen expert at a time: the chosen matrices are never all in memory.
  out = _fold(
    zero,
    (x_K, w_K),
    lambda c, x_TxS, w_ExN: c + x_TxS[..., None] * w_ExN[safe_ids].astype(jnp.float32),
  )
  return jnp.where(known[..., None], out, jnp.float32(0))
