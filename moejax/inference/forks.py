"""Forks: one combine of one layer at one token summed otherwise, everything after it native.

The token is the first that decoding reads. What came before (prefix, state, routes, expert terms)
is the same for every branch.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import combine_all_orders, Contract, merge_shared, study_orders
from moejax.inference.batches import state_length
from moejax.inference.forward import decode, LoadedModel, prefill
from moejax.inference.generate import continue_greedily, greedy
from moejax.models import Execution, Mode, Taps
from moejax.models.execution import DEFAULT

_TAPS = Taps(terms=True, shared=True, combined=True)


@dataclasses.dataclass(frozen=True)
class Forks:
  """One branch for each of P prompts, beside the native continuation.

  Attributes:
    native, branch: int32 [P, N], emitted tokens; the first is the one the fork reads.
    orders: int32 [P, K], of the branch.
    linf: float32 [P], the largest difference between its MoE output and the native one.
    num_orders: how many orders were compared.
    sampled: whether they are a sample of all K!.
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
  """Forks each prompt by the order whose MoE output is farthest from the native one.

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
  if layer not in model.config.moe_layers:
    raise ValueError(f"fork: layer {layer} has no experts; MoE layers: {model.config.moe_layers}.")
  length = state_length(max(map(len, prompts)) + num_tokens)
  logits, state, _ = prefill(model, prompts, length, mode=mode)
  native = continue_greedily(model, logits, state, num_tokens, mode=mode).tokens
  first = greedy(logits)[0]
  _, _, trace = decode(model, first, state, mode=mode, taps=_TAPS)
  here = {name: trace[name][layer, :, 0] for name in trace}
  orders, sampled = study_orders(model.config.top_k, scheme, key=key)
  contract = model.module.contract(mode).with_scheme(scheme)
  chosen, linf = _farthest(here, contract, orders)
  execution = _at_layer(model.config.num_layers, layer, chosen, scheme)
  logits, state, _ = decode(model, first, state, execution, mode=mode)
  rest = continue_greedily(model, logits, state, num_tokens - 1, mode=mode).tokens
  branch = np.concatenate([np.asarray(first)[:, None], rest], axis=1)
  return Forks(native, branch, chosen, linf, len(orders), sampled)


def _farthest(trace: dict[str, jax.Array], contract: Contract, orders: np.ndarray):
  """(order [P, K], distance [P]) of the farthest output for each row of a layer's trace."""
  chosen, distances = [], []
  for row in range(trace["terms"].shape[0]):
    sums = combine_all_orders(trace["terms"][row], contract, orders=orders)[1]
    shared = trace.get("shared")
    shared = None if shared is None else jnp.broadcast_to(shared[row][None], sums.shape)
    outputs = np.asarray(merge_shared(sums, shared, contract))
    distance = np.abs(outputs - np.asarray(trace["combined"][row])[None]).max(axis=1)
    chosen.append(orders[distance.argmax()])
    distances.append(distance.max())
  return np.array(chosen, np.int32), np.array(distances, np.float32)


def _at_layer(num_layers: int, layer: int, orders: np.ndarray, scheme: Contract) -> Execution:
  """The scheme and the orders [P, K] in one layer, for the one token of a call."""
  codes = np.full((num_layers, 1, 1), -1, np.int32)
  codes[layer] = scheme.code
  every = np.full((num_layers, len(orders), 1, orders.shape[1]), -1, np.int32)
  every[layer, :, 0] = orders
  return Execution(codes=jnp.asarray(codes), orders=jnp.asarray(every))
