"""Trace, freeze, fork: one combine of one layer at one token summed in other orders.

The event is the first token that decoding reads. Prefix, state, routes, expert terms and shared
output are the same for every branch; everything after the combine is native (paper, section 2.4.1).
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import combine_all_orders, Contract, merge_shared, study_orders
from moejax.combine.orders import class_representatives
from moejax.inference.batches import check_prompts, state_length
from moejax.inference.forward import decode, LoadedModel, prefill
from moejax.inference.generate import greedy
from moejax.inference.trajectory import idle_execution, STEP_TAPS
from moejax.models import Execution, Mode, PersistentState
from moejax.models.execution import DEFAULT

_ROUTE = ("ids", "weights", "slots")


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
  """What all branches of a prompt share, and the native step.

  Attributes:
    prompt: its token ids.
    layer: of the fork.
    token: the first emitted one, which the event reads.
    before: the state before the event, one row.
    terms: float32 [K, D], by ascending expert id.
    shared: float32 [D], or None.
    combined: float32 [D], native output of the MoE layer.
    post_block: float32 [D] or [hc, D], native (H_P of the paper).
    closing: what the block makes it of, with the output.
    ids, weights, slots: [K], the route.
  """

  prompt: tuple[int, ...]
  layer: int
  token: int
  before: PersistentState
  terms: jax.Array
  shared: jax.Array | None
  combined: np.ndarray
  post_block: np.ndarray
  closing: jax.Array
  ids: np.ndarray
  weights: np.ndarray
  slots: np.ndarray

  def native_order(self, contract: Contract) -> np.ndarray:
    """int32 [K], the family's own order of the terms."""
    ascending = np.arange(len(self.ids), dtype=np.int32)
    return self.slots if contract.order == "slot" else ascending


@dataclasses.dataclass(frozen=True, eq=False)
class Fork:
  """The branches of an event after the token that forks them: P orders, R distinct MoE outputs.

  Attributes:
    event: what they share.
    scheme: operand and accumulator of the forked combine.
    orders: int32 [P, K].
    sampled: whether they are a sample of all there are.
    output: int [P], which of the R distinct MoE outputs each order gives, by first appearance.
    output_linf: float32 [R], distance of each from the native output.
    post_block: float32 [R, ...], the state after the block (H_B).
    state_linf: float32 [R], distance from the native one.
  """

  event: Event
  scheme: Contract
  orders: np.ndarray
  sampled: bool
  output: np.ndarray
  output_linf: np.ndarray
  post_block: np.ndarray
  state_linf: np.ndarray

  @property
  def num_states(self) -> int:
    """How many distinct states after the block there are."""
    return len(distinct(self.post_block)[0])

  @property
  def unlike_native(self) -> np.ndarray:
    """bool [P], whether the state after the block is not the native one, bit for bit."""
    native = self.event.post_block.tobytes()
    return np.array([state.tobytes() != native for state in self.post_block])[self.output]

  @property
  def representatives(self) -> np.ndarray:
    """int [R], the lowest branch of each distinct output."""
    return np.unique(self.output, return_index=True)[1]

  def farthest(self) -> int:
    """The lowest branch whose post-block state is farthest from the native one."""
    return int(self.state_linf[self.output].argmax())


def freeze(
  model: LoadedModel, prompt: Sequence[int], layer: int, length: int, *, mode: Mode = DEFAULT
) -> Event:
  """Runs a prompt and the native event.

  Args:
    model: to run.
    prompt: token ids.
    layer: of the fork; it has routed experts.
    length: positions of the states: prompt and every token that branches go on with.
    mode: static choices.

  Raises:
    ValueError: a layer without experts.
  """
  check_prompts([prompt], model.config.vocab_size)
  check_layer(model, layer)
  logits, before, _ = prefill(model, [prompt], state_length(length), mode=mode)
  token = greedy(logits)[0]
  _, _, trace = decode(model, token, before, idle_execution(model, 1), mode=mode, taps=STEP_TAPS)
  here = {name: trace[name][layer, 0, 0] for name in trace}
  host = {name: np.asarray(here[name]) for name in ("combined", "post_block", *_ROUTE)}
  return Event(
    prompt=tuple(prompt),
    layer=layer,
    token=int(token[0]),
    before=before,
    terms=here["terms"],
    shared=here.get("shared"),
    closing=here["closing"],
    **host,
  )


def check_layer(model: LoadedModel, layer: int) -> None:
  """Refuses a layer that the model does not have, or that has no routed experts."""
  if layer not in model.config.moe_layers:
    layers = ", ".join(map(str, model.config.moe_layers))
    raise ValueError(f"fork: layer {layer} has no routed experts; those that have: {layers}.")


def check_horizon(num_tokens: int) -> None:
  """Refuses continuations in which nothing follows the token that the event reads."""
  if num_tokens < 2:
    raise ValueError(f"a fork is followed for at least 2 emitted tokens, got {num_tokens}.")


def branch_orders(num_terms: int, scheme: Contract, *, key: jax.Array) -> tuple[np.ndarray, bool]:
  """One order of each structural class, and whether they are a sample (`study_orders`)."""
  orders, sampled = study_orders(num_terms, scheme, key=key)
  return (orders, True) if sampled else (class_representatives(num_terms, scheme), False)


def outputs_of(event: Event, contract: Contract, orders: np.ndarray) -> np.ndarray:
  """float32 [P, D]: the MoE output of each order of the event's terms."""
  sums = combine_all_orders(event.terms, contract, orders=orders)[1]
  shared = event.shared
  shared = None if shared is None else jnp.broadcast_to(shared[None], sums.shape)
  return np.asarray(merge_shared(sums, shared, contract))


def fork(
  model: LoadedModel,
  event: Event,
  scheme: Contract,
  *,
  key: jax.Array | None = None,
  orders: np.ndarray | None = None,
  mode: Mode = DEFAULT,
) -> Fork:
  """Every branch of an event, up to the end of its block; nothing else of the model is run.

  Args:
    model: that made the event, in the same mode.
    event: frozen.
    scheme: of the branches.
    key: of the sample of orders, where there are too many.
    orders: int32 [P, K], instead of one for each structural class.
    mode: static choices.
  """
  sampled = False
  if orders is None:
    orders, sampled = branch_orders(model.config.top_k, scheme, key=key)
  outputs = outputs_of(event, model.module.contract(mode).with_scheme(scheme), orders)
  first, output = distinct(outputs)
  outputs = outputs[first]
  states = np.asarray(_close(model.module, mode, event.closing, jnp.asarray(outputs)))
  far = lambda x, native: np.abs(x - native[None]).reshape(len(x), -1).max(axis=1)
  return Fork(
    event=event,
    scheme=scheme,
    orders=orders,
    sampled=sampled,
    output=output,
    output_linf=far(outputs, event.combined),
    post_block=states,
    state_linf=far(states, event.post_block),
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _close(module, mode, closing, outputs):
  """The state after the block for outputs [R, D]."""
  closing = jnp.broadcast_to(closing[None], (len(outputs), *closing.shape))
  return module.close_block(mode, closing, outputs)


def distinct(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The rows of float32 [P, ...] that differ in bits, by first appearance.

  Returns:
    (index of each [R], which of them each row is [P]).
  """
  _, first, which = np.unique(
    x.reshape(len(x), -1).view(np.uint32), axis=0, return_index=True, return_inverse=True
  )
  by_appearance = np.argsort(first)
  return first[by_appearance], np.argsort(by_appearance)[which.reshape(-1)]


def branch_execution(
  model: LoadedModel, layer: int, orders: np.ndarray, codes: np.ndarray
) -> Execution:
  """Contract codes [P] and orders [P, K] of P rows in one layer, for the one token of a call."""
  every = idle_execution(model, len(orders))
  return every.replace(
    codes=every.codes.at[layer, :, 0].set(codes), orders=every.orders.at[layer, :, 0].set(orders)
  )
