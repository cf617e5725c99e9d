"""One forked branch beside the native continuation, for many prompts at once."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import Contract
from moejax.inference.batches import state_length
from moejax.inference.branches import branch_execution, check_horizon, check_layer, fork, freeze
from moejax.inference.forward import LoadedModel, prefill
from moejax.inference.generate import emit, greedy
from moejax.models import Mode
from moejax.models.execution import DEFAULT


@dataclasses.dataclass(frozen=True)
class Forks:
  """One branch for each of P prompts, beside the native continuation.

  Attributes:
    native, branch: int32 [P, N], emitted tokens; the first is the one the fork reads.
    orders: int32 [P, K], of the branch.
    linf: float32 [P], how far its post-block state is from the native one.
    num_orders: how many were compared, one of each structural class.
    sampled: whether they are a sample of all there are.
  """

  native: np.ndarray
  branch: np.ndarray
  orders: np.ndarray
  linf: np.ndarray
  num_orders: int
  sampled: bool

  def changed(self, horizon: int) -> np.ndarray:
    """bool [P]: whether the first `horizon` tokens differ."""
    return (self.native[:, :horizon] != self.branch[:, :horizon]).any(axis=1)


def fork_farthest(
  model: LoadedModel,
  prompts: Sequence[Sequence[int]],
  layer: int,
  scheme: Contract,
  num_tokens: int,
  *,
  key: jax.Array,
  mode: Mode = DEFAULT,
) -> Forks:
  """Forks each prompt by the class whose post-block state is farthest from the native one.

  Args:
    model: to run.
    prompts: token ids of each.
    layer: of the fork; a MoE layer.
    scheme: operand and accumulator of the branch.
    num_tokens: N ≥ 2.
    key: of the sample of orders, where there are more than can be listed.
    mode: static choices.

  Raises:
    ValueError: a layer without experts.
  """
  orders, distances = [], []
  for prompt in prompts:
    event = freeze(model, prompt, layer, len(prompt) + 1, mode=mode)
    found = fork(model, event, scheme, key=key, mode=mode)
    branch = found.farthest()
    orders.append(found.orders[branch])
    distances.append(found.state_linf[found.output[branch]])
  orders = np.array(orders, np.int32)
  native, branch = continue_forked(model, prompts, layer, orders, scheme, num_tokens, mode=mode)
  return Forks(native, branch, orders, np.array(distances), len(found.orders), found.sampled)


def continue_forked(
  model: LoadedModel,
  prompts: Sequence[Sequence[int]],
  layer: int,
  orders: np.ndarray,
  scheme: Contract,
  num_tokens: int,
  *,
  mode: Mode = DEFAULT,
) -> tuple[np.ndarray, np.ndarray]:
  """(native, branch), int32 [P, num_tokens] each: prompts forked by orders int32 [P, K]."""
  check_layer(model, layer)
  check_horizon(num_tokens)
  length, count = state_length(max(map(len, prompts)) + num_tokens), len(prompts)
  logits, state, _ = prefill(model, prompts, length, mode=mode)
  # Native rows, then the branches: one batch.
  state = jax.tree.map(lambda x: jnp.concatenate([x, x]), state)
  first = np.tile(np.asarray(greedy(logits)[0]), 2)
  orders = np.concatenate([np.full_like(orders, -1), orders])
  codes = np.repeat([-1, scheme.code], count)
  fork = branch_execution(model, layer, orders, codes)
  event = emit(model, first, state, 1, fork, mode=mode, donate=True)
  pieces = [first[:, None], event.tokens]
  if num_tokens > 2:
    idle = branch_execution(model, layer, np.full_like(orders, -1), np.full_like(codes, -1))
    rest = emit(
      model, event.tokens[:, 0], event.state, num_tokens - 2, idle, mode=mode, donate=True
    )
    pieces.append(rest.tokens)
  tokens = np.concatenate(pieces, axis=1)
  return tokens[:count], tokens[count:]
