"""Canonical matrix products: one sentence of arithmetic, whatever the batch, threads or machine.

    c[m, n] = fold over k = 0 .. K-1 of fl(c + a[m, k] · w[k, n]),   c = +0 at first,   in float32

Operands are BF16, so that every product is exact in FP32 and a fused multiply-add changes nothing.
Rows do not see each other: a row of a large call, a call of its own and a `vmap` lane have the same
bits. Zeros appended to k change nothing.

Domain: no nonzero product or partial sum below 2^-126, where XLA flushes and the custom calls do
not. `MOEJAX_CHECK_DOMAIN=1` checks it and names the offending row (`domain`).

Each function has two implementations with the same bits, a custom call (`native`) and plain XLA
(`dots_xla`). Inference only: neither has a gradient.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import domain, dots_xla
from moejax.numerics.library import native

# Leading axes that vmap adds arrive as 1 where an operand is not batched, and the kernels broadcast
# them: a vmap over rows becomes a larger M, and weights are never copied per lane.
_ffi = functools.partial(jax.ffi.ffi_call, vmap_method="expand_dims")


def dot(a: jax.Array, w: jax.Array, *, blocked: bool = False) -> jax.Array:
  """Canonical product of BF16 operands.

  Args:
    a: bfloat16 [..., K].
    w: bfloat16 [K, N].
    blocked: sum within blocks of 256 consecutive k, each from +0, then add the blocks in order:
      about a fifth of the rounding error at K = 4096. Another contract, the same speed.

  Returns:
    float32 [..., N].

  Raises:
    TypeError, ValueError: operands that are not bfloat16, or whose K differ.
  """
  _require("dot", jnp.bfloat16, a=a, w=w)
  _require_matmul("dot", a, w, w_rank=2)
  if domain.checking():
    return domain.dot("dot", a, w, blocked=blocked)
  return _dot_native(a, w, blocked) if native() else _dot_xla(a, w, blocked)


def dot_f32(a: jax.Array, w: jax.Array) -> jax.Array:
  """Canonical product of FP32 operands: each product is rounded to FP32, then added.

  Args:
    a: float32 [..., K].
    w: float32 [K, N].

  Returns:
    float32 [..., N].
  """
  _require("dot_f32", jnp.float32, a=a, w=w)
  _require_matmul("dot_f32", a, w, w_rank=2)
  if domain.checking():
    return domain.dot("dot_f32", a, w)
  return _dot_f32_native(a, w) if native() else _dot_f32_xla(a, w)


def batched_dot(
  a: jax.Array, w: jax.Array, lengths: jax.Array | None = None, *, transposed: bool = False
) -> jax.Array:
  """Canonical products over leading axes, each row with a valid length of its own (attention).

  Args:
    a: bfloat16 [*B, M, K].
    w: bfloat16 [*B, K, N]; [*B, N, K] if `transposed` (keys as a cache stores them).
    lengths: int32 [*B, M], or anything that broadcasts to it. Row m uses only the first
      `lengths[m]` entries of the cache axis of w: k if not `transposed` (values), n if so (keys).
      Nothing beyond is read for that row. None: all.
    transposed: the layout of w.

  Returns:
    float32 [*B, M, N]; beyond a row's length, columns of a transposed product are +0.
  """
  _require("batched_dot", jnp.bfloat16, a=a, w=w)
  _require_matmul("batched_dot", a, jnp.swapaxes(w, -1, -2) if transposed else w, w_rank=a.ndim)
  if a.shape[:-2] != w.shape[:-2]:
    raise ValueError(f"batched_dot: leading axes of a {a.shape} and w {w.shape} differ.")
  if lengths is None:
    lengths = jnp.full((), w.shape[-2], jnp.int32)
  _require("batched_dot", jnp.int32, lengths=lengths)
  lengths = jnp.broadcast_to(lengths, a.shape[:-1])
  if domain.checking():
    return domain.dot("batched_dot", a, w, lengths=lengths, transposed=transposed)
  call = _batched_dot_native if native() else _batched_dot_xla
  return call(a, w, lengths, transposed)


def grouped_dot(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
  """Each row times the matrix of its expert; bit-equal to `dot(row, w[id])`.

  Args:
    x: bfloat16 [T, K], one row per token, or [T, S, K], one per slot.
    w: bfloat16 [E, K, N].
    ids: int32 [T, S]. An id outside 0 .. E-1 (a masked slot) gives a row of +0.

  Returns:
    float32 [T, S, N].
  """
  _require("grouped_dot", jnp.bfloat16, x=x, w=w)
  _require("grouped_dot", jnp.int32, ids=ids)
  per_token = x.ndim == 2
  x = x[:, None, :] if per_token else x
  fits = w.ndim == 3 and ids.ndim == 2 and x.ndim == 3 and x.shape[2] == w.shape[1]
  if not fits or x.shape[0] != ids.shape[0] or x.shape[1] not in (1, ids.shape[1]):
    raise ValueError(
      "grouped_dot: expected x [T, K] or [T, S, K], w [E, K, N] and ids [T, S], got "
      f"{x.shape if not per_token else (x.shape[0], x.shape[2])}, {w.shape} and {ids.shape}."
    )
  if domain.checking():
    return domain.grouped_dot(x, w, ids)
  return _grouped_dot_native(x, w, ids) if native() else _grouped_dot_xla(x, w, ids)


def _over_rows(product, a, w):
  """`product` of [M, K] × [K, N] over the rows of a, whatever its leading axes."""
  out = product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), w)
  return out.reshape(*a.shape[:-1], w.shape[1])


def _dot_call(a, w, target, **attributes):
  out = jax.ShapeDtypeStruct((a.shape[0], w.shape[1]), jnp.float32)
  return _ffi(target, out)(a, w, **attributes)


@functools.partial(jax.jit, static_argnums=2)
def _dot_native(a, w, blocked):
  return _over_rows(lambda a, w: _dot_call(a, w, "moejax_dot", blocked=np.bool_(blocked)), a, w)


@functools.partial(jax.jit, static_argnums=2)
def _dot_xla(a, w, blocked):
  return _over_rows(lambda a, w: dots_xla.dot(a, w, blocked), a, w)


@jax.jit
def _dot_f32_native(a, w):
  return _over_rows(lambda a, w: _dot_call(a, w, "moejax_dot_f32"), a, w)


@jax.jit
def _dot_f32_xla(a, w):
  return _over_rows(dots_xla.dot_f32, a, w)


@functools.partial(jax.jit, static_argnums=3)
def _batched_dot_native(a, w, lengths, transposed):
  n = w.shape[-2] if transposed else w.shape[-1]
  out = jax.ShapeDtypeStruct((*a.shape[:-1], n), jnp.float32)
  return _ffi("moejax_batched_dot", out)(a, w, lengths, transposed=np.bool_(transposed))


@jax.jit
def _grouped_dot_native(x, w, ids):
  out = jax.ShapeDtypeStruct((*ids.shape, w.shape[-1]), jnp.float32)
  return _ffi("moejax_grouped_dot", out)(x, w, ids)


_batched_dot_xla = jax.jit(dots_xla.batched_dot, static_argnums=3)
_grouped_dot_xla = jax.jit(dots_xla.grouped_dot)


def _require(name: str, dtype, **operands) -> None:
  for label, operand in operands.items():
    found = getattr(operand, "dtype", type(operand).__name__)
    if found != dtype:
      hint = " (cast it where the rounding is meant)" if dtype == jnp.bfloat16 else ""
      raise TypeError(f"{name}: {label} must be {jnp.dtype(dtype).name}, got {found}{hint}.")


def _require_matmul(name: str, a, w, w_rank: int) -> None:
  if a.ndim < 1 or w.ndim != w_rank or w.ndim < 2 or a.shape[-1] != w.shape[-2]:
    raise ValueError(
      f"{name}: the last axis of a {a.shape} must match the second to last of w {w.shape}."
    )
