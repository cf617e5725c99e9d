"""Routing: from router logits to a set of experts, their weights and the order of their slots.

The tie rule is one sentence: of equal scores the lowest expert id wins. Ids are kept ascending; the
router's own order is a permutation beside them.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.models.indexing import take
from moejax.models.run import Run
from moejax.numerics import materialize

_NONE = np.float32(-np.inf)


@dataclasses.dataclass(frozen=True)
class Route:
  """Selected experts of [B, T] tokens; see `Taps` for the fields."""

  ids: jax.Array
  weights: jax.Array
  slots: jax.Array
  margins: jax.Array
  ties: jax.Array


@dataclasses.dataclass(frozen=True)
class Selection:
  """Selected experts of [B, T] tokens, in slot order: score descending.

  Attributes:
    ids: int32 [B, T, K].
    margins, ties: [B, T]; see `Taps`.
    excess: float32 [B, T, K], how far each one's score lies above the strongest left out; None
      where a table decides.
  """

  ids: jax.Array
  margins: jax.Array
  ties: jax.Array
  excess: jax.Array | None


def by_table(ids) -> Selection:
  """What a table decided: no margin, no tie."""
  shape = ids.shape[:-1]
  return Selection(ids, jnp.full(shape, np.nan, jnp.float32), jnp.zeros(shape, bool), None)


def select(run: Run, scores, logits, top_k: int) -> Selection:
  """The top_k experts by score, lowest id first among equals.

  Args:
    scores: float32 [B, T, E], what the family ranks by.
    logits: float32 [B, T, E], what a margin is measured in.
    top_k: K.
  """
  if run.execution.expert_mask is not None:
    scores = jnp.where(run.execution.expert_mask, scores, _NONE)
  # lax.top_k takes the lowest index of equals.  +0: its total order has -0 below +0.
  _, ids = lax.top_k(scores + np.float32(0), min(top_k + 1, scores.shape[-1]))
  # In memory, or XLA sees parts of it read and sorts all scores instead.
  ids = materialize(ids.astype(jnp.int32))
  if ids.shape[-1] == top_k:  # no expert is left out
    margins = jnp.full(ids.shape[:-1], np.inf, jnp.float32)
    excess = jnp.full(ids.shape, np.inf, jnp.float32)
    return Selection(ids, margins, jnp.zeros(ids.shape[:-1], bool), excess)
  expert = lax.broadcasted_iota(jnp.int32, (*scores.shape, 1), scores.ndim - 1)
  chosen = (ids[..., None, :top_k] == expert).any(axis=-1)
  weakest = jnp.where(chosen, logits, np.float32(np.inf)).min(axis=-1)
  left_out = ~chosen
  if run.execution.expert_mask is not None:
    left_out &= run.execution.expert_mask
  strongest = jnp.where(left_out, logits, _NONE).max(axis=-1)
  last, next_best = (take(scores, ids[..., i : i + 1], axis=-1)[..., 0] for i in (top_k - 1, top_k))
  ids = ids[..., :top_k]
  excess = take(logits, ids, axis=-1) - strongest[..., None]
  return Selection(ids, weakest - strongest, last == next_best, excess)


def weigh(
  run: Run,
  scores,
  ids,
  *,
  normalize: bool,
  epsilon: float = 0.0,
  scale: float = 1.0,
  rounded: bool = False,
):
  """Weights of the selected experts: float32 [B, T, K] in the order of ids.

  Args:
    scores: float32 [B, T, E], unbiased.
    ids: int32 [B, T, K] in slot order.
    normalize: whether they are divided by their sum, added up in slot order.
    epsilon: added to that sum.
    scale: factor of the result.
    rounded: whether sum, quotient and product are rounded to BF16.
  """
  r = run.ops.round if rounded else lambda x: x
  weights = take(scores, ids, axis=-1)
  if normalize:
    total = weights[..., 0]
    for slot in range(1, weights.shape[-1]):
      total = total + weights[..., slot]
    total = r(r(total) + np.float32(epsilon))
    weights = r(run.ops.divide(weights, total[..., None]))
  return weights if scale == 1.0 else r(run.ops.multiply(weights, np.float32(scale)))


def finish(run: Run, selection: Selection, weights) -> Route:
  """Softens weights [B, T, K] in slot order, sorts them by expert id, and applies the pins."""
  ids, tau = selection.ids, run.execution.softening
  if tau is not None and selection.excess is not None:
    tau = jnp.broadcast_to(tau[..., None], weights.shape)
    share = jnp.clip(run.ops.divide(selection.excess, jnp.where(tau > 0, tau, 1)), 0, 1)
    weights = jnp.where(tau > 0, run.ops.multiply(weights, share), weights)
  # Rank of each slot among the ids of its token, and the slot of each rank, by counting.
  before = ids[..., None, :] < ids[..., :, None]
  slots = before.astype(jnp.int32).sum(axis=-1)
  index = lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
  has_rank = slots[..., None, :] == index[..., :, None]
  place = jnp.where(has_rank, index[..., None, :], 0).sum(axis=-1)
  ids, weights = (take(x, place, axis=-1) for x in (ids, weights))
  pins = run.execution.pins
  if pins is not None:
    pinned = pins.mask[..., None]
    ids, weights, slots = (
      jnp.where(pinned, pin, own)
      for pin, own in ((pins.ids, ids), (pins.weights, weights), (pins.slots, slots))
    )
  ids = jnp.where(run.valid[..., None], ids, -1)
  return Route(ids, weights, slots, selection.margins, selection.ties)


def router_dtype(run: Run, own: str) -> str:
  """The dtype of router logits: the mode's, or the family's own."""
  return run.mode.router_dtype or own


def router_logits(run: Run, x, weight, own_dtype: str):
  """x [B, T, D] · weight [D, E] → float32 [B, T, E], rounded if the router works in bfloat16."""
  logits = run.ops.matmul(x, weight)
  return run.ops.round(logits) if router_dtype(run, own_dtype) == "bfloat16" else logits
