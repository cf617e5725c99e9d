"""Rows times the matrix of their expert in plain XLA, differentiable, with no row dropped.

Rows are sorted by expert and cut into blocks of one expert each, so that the product is a batch of
ordinary ones. Forward and backward only gather: XLA's scatter on CPU is a serial loop. R rows, E
experts, M blocks of b rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.indexing import quotient
from moejax.numerics import materialize

_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 128


class _Plan(NamedTuple):
  """Where rows and blocks find each other.

  Attributes:
    place: int32 [R], where in the blocks a row is.
    chosen: bool [R], false for a row without an expert, which is nowhere.
    source: int32 [M · b], which row stands there; any where none does.
    filled: bool [M · b], whether one does.
    owner: int32 [M], the expert of a block.
  """

  place: jax.Array
  chosen: jax.Array
  source: jax.Array
  filled: jax.Array
  owner: jax.Array


def _plan(experts, num_experts: int) -> _Plan:
  """The blocks of rows with these experts, int32 [R]; a negative one is none."""
  num_rows = experts.shape[0]
  size = _SMALLEST_BLOCK
  while size < min(num_rows // (4 * num_experts), _LARGEST_BLOCK):
    size *= 2
  by_expert = jnp.argsort(experts, stable=True).astype(jnp.int32)
  every = jnp.arange(num_experts, dtype=jnp.int32)[None]
  counts = (experts[:, None] == every).sum(axis=0, dtype=jnp.int32)
  start = (experts < 0).sum(dtype=jnp.int32) + jnp.cumsum(counts) - counts
  blocks = quotient(counts + (size - 1), size)
  block_end = jnp.cumsum(blocks)
  block = jnp.arange(num_rows // size + num_experts, dtype=jnp.int32)[:, None]
  owner = jnp.minimum((block_end[None] <= block).sum(axis=1, dtype=jnp.int32), num_experts - 1)
  first = (block[:, 0] - (block_end - blocks)[owner]) * size
  within = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  filled = (within < counts[owner][:, None]).reshape(-1)
  source = by_expert[jnp.clip(start[owner][:, None] + within, 0, num_rows - 1)].reshape(-1)
  place = jnp.zeros_like(experts)
  place = place.at[jnp.where(filled, source, num_rows)].set(
    jnp.arange(source.size, dtype=jnp.int32), mode="drop"
  )
  # In memory, or every gather works its indices out again.
  return _Plan(*map(materialize, (place, experts >= 0, source, filled, owner)))


def _rows(x, index):
  return x.at[index].get(mode="promise_in_bounds")


def _out_of_blocks(plan: _Plan, blocks):
  """Blocks [M, b, N] as rows [R, N], zeros where there is no expert."""
  rows = _rows(blocks.reshape(-1, blocks.shape[-1]), plan.place)
  return jnp.where(plan.chosen[:, None], rows, jnp.zeros_like(rows))


def _batched(equation, x, w):
  out = jnp.einsum(equation, x, w, preferred_element_type=jnp.float32)
  return materialize(out)


def _in_blocks(plan: _Plan, x, share: int):
  """Rows x [R / share, K] as blocks [M, b, K]; row r is x[r // share]."""
  blocks = _rows(x, quotient(plan.source, share))
  return materialize(blocks.reshape(plan.owner.shape[0], -1, x.shape[-1]))


@jax.custom_vjp
def _product(x, w, plan: _Plan):
  return _forward(x, w, plan)[0]


def _forward(x, w, plan):
  rows = _in_blocks(plan, x, plan.place.shape[0] // x.shape[0])
  out = _batched("mbk,mkn->mbn", rows, _rows(w, plan.owner))
  return _out_of_blocks(plan, out), (rows, x, w, plan)


def _backward(residuals, grad):
  rows, x, w, plan = residuals
  grad = _rows(grad, plan.source) * plan.filled[:, None].astype(jnp.float32)
  grad = materialize(grad.reshape(*rows.shape[:2], -1))
  by_block = _batched("mbk,mbn->mkn", rows, grad)
  mine = plan.owner[None] == jnp.arange(w.shape[0], dtype=jnp.int32)[:, None]
  grad_w = jnp.einsum("em,mkn->ekn", mine.astype(jnp.float32), by_block)
  grad_x = _out_of_blocks(plan, _batched("mbn,mkn->mbk", grad, _rows(w, plan.owner)))
  grad_x = grad_x.reshape(x.shape[0], -1, x.shape[-1]).sum(axis=1)
  return grad_x.astype(x.dtype), grad_w.astype(w.dtype), None


_product.defvjp(_forward, _backward)


def grouped_product(x, w, ids):
  """x [N, K] or [N, S, K], w [E, K, M], ids int32 [N, S] → float32 [N, S, M].

  A row whose id is no expert gives zeros. Operands are of one dtype.
  """
  known = (ids >= 0) & (ids < w.shape[0])
  plan = _plan(jnp.where(known, ids, -1).reshape(-1), w.shape[0])
  return _product(x.reshape(-1, x.shape[-1]), w, plan).reshape(*ids.shape, -1)
