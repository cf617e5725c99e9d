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

_NONE = np.float32(-np.inf)


@dataclasses.dataclass(frozen=True)
class Route:
  """Selected experts of [B, T] tokens; see `Taps` for the fields."""

  ids: jax.Array
  weights: jax.Array
  slots: jax.Array
  margins: jax.Array
  ties: jax.Array


def select(run: Run, scores, logits, top_k: int):
  """The top_k experts by score, lowest id first among equals.

  Args:
    scores: float32 [B, T, E], what the family ranks by.
    logits: float32 [B, T, E], what a margin is measured in.
    top_k: K.

  Returns:
    ids int32 [B, T, K] in slot order (score descending); margins and ties [B, T].
  """
  if run.execution.expert_mask is not None:
    scores = jnp.where(run.execution.expert_mask, scores, _NONE)
  # lax.top_k takes the lowest index of equals.  +0: its total order has -0 below +0.
  best, ids = lax.top_k(scores + np.float32(0), min(top_k + 1, scores.shape[-1]))
  ids = ids.astype(jnp.int32)
  if best.shape[-1] == top_k:  # no expert is left out
    return ids, jnp.full(ids.shape[:-1], np.inf, jnp.float32), jnp.zeros(ids.shape[:-1], bool)
  expert = lax.broadcasted_iota(jnp.int32, (*scores.shape, 1), scores.ndim - 1)
  chosen = (ids[..., None, :top_k] == expert).any(axis=-1)
  weakest = jnp.where(chosen, logits, np.float32(np.inf)).min(axis=-1)
  left_out = ~chosen
  if run.execution.expert_mask is not None:
    left_out &= run.execution.expert_mask
  strongest = jnp.where(left_out, logits, _NONE).max(axis=-1)
  return ids[..., :top_k], weakest - strongest, best[..., top_k - 1] == best[..., top_k]


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


def finish(run: Run, ids, weights, margins, ties) -> Route:
  """Sorts slots by expert id and applies the execution's pins.

  Args:
    ids, weights: [B, T, K] in slot order.
    margins, ties: [B, T].
  """
  # Rank of each slot among the ids of its token, by counting.
  before = ids[..., None, :] < ids[..., :, None]
  slots = before.astype(jnp.int32).sum(axis=-1)
  place = jnp.argsort(slots, axis=-1)
  ids, weights = (take(x, place, axis=-1) for x in (ids, weights))
  pins = run.execution.pins
  if pins is not None:
    pinned = pins.mask[..., None]
    ids, weights, slots = (
      jnp.where(pinned, pin, own)
      for pin, own in ((pins.ids, ids), (pins.weights, weights), (pins.slots, slots))
    )
  return Route(jnp.where(run.valid[..., None], ids, -1), weights, slots, margins, ties)


def router_dtype(run: Run, own: str) -> str:
  """The dtype of router logits: the mode's, or the family's own."""
  return run.mode.router_dtype or own


def router_logits(run: Run, x, weight, own_dtype: str):
  """x [B, T, D] · weight [D, E] → float32 [B, T, E], rounded if the router works in bfloat16."""
  logits = run.ops.matmul(x, weight)
  return run.ops.round(logits) if router_dtype(run, own_dtype) == "bfloat16" else logits
