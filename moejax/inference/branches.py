"""Trace, freeze, fork: one combine of one layer at one token summed in other orders.

The event is the first token that decoding reads. Prefix, state, routes, expert terms and shared
output are the same for every branch; everything after the combine is native (paper, section 2.4.1).
"""

from collections.abc import Iterator, Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import combine_all_orders, Contract, merge_shared, study_orders
from moejax.combine.orders import class_representatives
from moejax.inference.batches import check_prompts, state_length
from moejax.inference.forward import decode, LoadedModel, prefill
from moejax.inference.generate import continue_greedily, greedy
from moejax.models import Execution, Mode, PersistentState, Taps
from moejax.models.execution import DEFAULT

# Branches that are in flight at once: memory is that of so many states, however many there are.
LANES = 128
# Tokens after which branches are looked through for complete states that have become equal.
_SEGMENT = 16

_ROUTE = ("ids", "weights", "slots")
_FROZEN = Taps(
  terms=True, shared=True, combined=True, post_block=True, ids=True, weights=True, slots=True
)
_BRANCH = Taps(post_block=True, state_fingerprints=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
  """What all branches of a prompt share, and the native step.

  Attributes:
    prompt: its token ids.
    layer: of the fork.
    token: the first emitted one, which the event reads.
    before, after: the state around the event, one row.
    logits: float32 [1, V], native, of the event.
    terms: float32 [K, D], by ascending expert id.
    shared: float32 [D], or None.
    combined: float32 [D], native output of the MoE layer.
    post_block: float32 [D] or [hc, D], native (H_P of the paper).
    ids, weights, slots: [K], the route.
  """

  prompt: tuple[int, ...]
  layer: int
  token: int
  before: PersistentState
  after: PersistentState
  logits: jax.Array
  terms: jax.Array
  shared: jax.Array | None
  combined: np.ndarray
  post_block: np.ndarray
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
  def representatives(self) -> np.ndarray:
    """int [R], the lowest branch of each distinct output."""
    return np.unique(self.output, return_index=True)[1]

  def farthest(self) -> int:
    """The lowest branch whose post-block state is farthest from the native one."""
    return int(self.state_linf[self.output].argmax())


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
  """A fork whose branches all went on greedily.

  Attributes:
    fork: the branches.
    merged: int [P], which distinct complete state (persistent state and next token) each branch
      had when its event was over.
    tokens: int32 [P, N], emitted; the first is the one the event reads.
    native: int32 [N].
  """

  fork: Fork
  merged: np.ndarray
  tokens: np.ndarray
  native: np.ndarray


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
  logits, after, trace = decode(model, token, before, mode=mode, taps=_FROZEN)
  here = {name: trace[name][layer, 0, 0] for name in trace}
  host = {name: np.asarray(here[name]) for name in ("combined", "post_block", *_ROUTE)}
  return Event(
    prompt=tuple(prompt),
    layer=layer,
    token=int(token[0]),
    before=before,
    after=after,
    logits=logits,
    terms=here["terms"],
    shared=here.get("shared"),
    **host,
  )


def check_layer(model: LoadedModel, layer: int) -> None:
  """Refuses a layer that the model does not have, or that has no routed experts."""
  if layer not in model.config.moe_layers:
    layers = ", ".join(map(str, model.config.moe_layers))
    raise ValueError(f"fork: layer {layer} has no routed experts; those that have: {layers}.")


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
  """Every branch of an event, up to the end of the event.

  Args:
    model: that made the event, in the same mode.
    event: frozen.
    scheme: of the branches.
    key: of the sample of orders, where there are too many.
    orders: int32 [P, K], instead of one for each structural class.
    mode: static choices.
  """
  branches = _branches(model, event, scheme, key, orders, mode)
  steps = _event_steps(model, event, scheme, branches, mode)
  return _forked(event, scheme, branches, np.concatenate([step.post_block for step in steps]))


def branch_sweep(
  model: LoadedModel,
  event: Event,
  scheme: Contract,
  num_tokens: int,
  *,
  key: jax.Array | None = None,
  orders: np.ndarray | None = None,
  mode: Mode = DEFAULT,
) -> Sweep:
  """Every branch of an event and its greedy continuation; arguments as in `fork`.

  Orders with the same MoE output are one lane; lanes whose complete states are equal bit for bit
  are continued once. The prefix is stored once and laid out for `LANES` branches at a time.

  Args:
    num_tokens: N ≥ 2 emitted tokens, the first of which the event reads.
  """
  branches = _branches(model, event, scheme, key, orders, mode)
  native = continue_greedily(model, event.logits, event.after, num_tokens - 1, mode=mode).tokens[0]
  states, merged, rows = [], [], []
  known: dict[bytes, int] = {}
  for step in _event_steps(model, event, scheme, branches, mode):
    states.append(step.post_block)
    new = []
    for lane, print_ in enumerate(step.prints):
      if print_ not in known:
        known[print_] = len(known)
        new.append(lane)
      merged.append(known[print_])
    if new:
      rows.append(_continue(model, step, np.array(new), num_tokens - 1, mode))
  found = _forked(event, scheme, branches, np.concatenate(states))
  tokens = np.concatenate(rows)[np.array(merged)][found.output]
  first = np.full((len(tokens), 1), event.token, np.int32)
  return Sweep(
    found,
    np.array(merged)[found.output],
    np.concatenate([first, tokens], axis=1),
    np.concatenate([first[0], native]),
  )


def branch_execution(
  num_layers: int, layer: int, orders: np.ndarray, codes: np.ndarray
) -> Execution:
  """Contract codes [P] and orders [P, K] of P rows in one layer, for the one token of a call."""
  every_code = np.full((num_layers, len(orders), 1), -1, np.int32)
  every_code[layer, :, 0] = codes
  every = np.full((num_layers, len(orders), 1, orders.shape[1]), -1, np.int32)
  every[layer, :, 0] = orders
  return Execution(codes=jnp.asarray(every_code), orders=jnp.asarray(every))


@dataclasses.dataclass(frozen=True, eq=False)
class _Branches:
  """The orders of a fork, and what their sums are."""

  orders: np.ndarray
  sampled: bool
  output: np.ndarray
  first: np.ndarray  # branch of each distinct output
  linf: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
  """The event of some lanes: what came out of it, and a key of each lane's complete state."""

  logits: jax.Array
  state: PersistentState
  post_block: np.ndarray
  prints: list[bytes]


def _branches(model, event: Event, scheme, key, orders, mode) -> _Branches:
  sampled = False
  if orders is None:
    orders, sampled = branch_orders(model.config.top_k, scheme, key=key)
  outputs = outputs_of(event, model.module.contract(mode).with_scheme(scheme), orders)
  _, first, output = np.unique(
    outputs.view(np.uint32), axis=0, return_index=True, return_inverse=True
  )
  by_appearance = np.argsort(first)
  number = np.argsort(by_appearance)
  first = first[by_appearance]
  linf = np.abs(outputs[first] - event.combined[None]).max(axis=1)
  return _Branches(orders, sampled, number[output.reshape(-1)], first, linf)


def _forked(event: Event, scheme, branches: _Branches, post_block: np.ndarray) -> Fork:
  far = np.abs(post_block - event.post_block[None]).reshape(len(post_block), -1).max(axis=1)
  return Fork(
    event,
    scheme,
    branches.orders,
    branches.sampled,
    branches.output,
    branches.linf,
    post_block,
    far,
  )


def _event_steps(model, event: Event, scheme, branches: _Branches, mode) -> Iterator[_Step]:
  """Runs the event with each distinct output in its layer, some lanes at a time."""
  orders = branches.orders[branches.first]
  for at in range(0, len(orders), LANES):
    here = orders[at : at + LANES]
    lanes = padded(len(here))
    rows = here[np.minimum(np.arange(lanes), len(here) - 1)]
    codes = np.full(lanes, scheme.code)
    execution = branch_execution(model.config.num_layers, event.layer, rows, codes)
    logits, state, trace = decode(
      model,
      np.full(lanes, event.token),
      spread(event.before, lanes),
      execution,
      mode=mode,
      taps=_BRANCH,
    )
    token = np.asarray(greedy(logits)[0])
    yield _Step(
      logits,
      state,
      np.asarray(trace["post_block"][event.layer, : len(here), 0]),
      state_keys(trace["state_fingerprints"], token)[: len(here)],
    )


def padded(lanes: int) -> int:
  """Lanes to run for so many: a power of two, so that few sizes are compiled."""
  return 1 << (lanes - 1).bit_length()


def spread(state: PersistentState, lanes: int) -> PersistentState:
  """One row for each of some lanes."""
  return jax.tree.map(lambda x: jnp.repeat(x, lanes, axis=0), state)


def state_keys(fingerprints, next_token: np.ndarray) -> list[bytes]:
  """A key for each row's persistent state, uint32 [L, B, 4], and the token it reads next [B]."""
  prints = np.asarray(fingerprints)
  return [prints[:, row].tobytes() + next_token[row].tobytes() for row in range(prints.shape[1])]


def _continue(model, step: _Step, lanes: np.ndarray, num_tokens: int, mode) -> np.ndarray:
  """int32 [len(lanes), num_tokens]: greedy tokens of some lanes; what becomes equal runs once."""
  logits, state = step.logits, step.state
  rows, of = lanes, np.arange(len(lanes))
  pieces, left = [], num_tokens
  while True:
    rows = rows[np.minimum(np.arange(padded(len(rows))), len(rows) - 1)]
    if not np.array_equal(rows, np.arange(len(logits))):
      logits, state = logits[rows], state.rows(rows)
    count = min(_SEGMENT, left)
    out = continue_greedily(model, logits, state, count, mode=mode, donate=True)
    pieces.append(out.tokens[of])
    left -= count
    if not left:
      return np.concatenate(pieces, axis=1)
    logits, state, rows, of = _merge(model, out.tokens[:, -1], out.state, of, mode)


def _merge(model, token: np.ndarray, state: PersistentState, of: np.ndarray, mode):
  """Reads a token in every lane and finds lanes that are then in the same complete state.

  Returns:
    (logits, state, lanes to go on with, for each branch which of those is its own).
  """
  config, lanes = model.config, len(token)
  # Native, as arrays like those of a fork: the same compiled program.
  none = np.full((lanes, config.top_k), -1)
  execution = branch_execution(config.num_layers, config.moe_layers[0], none, none[:, 0])
  logits, state, trace = decode(model, token, state, execution, mode=mode, taps=_BRANCH)
  keys = state_keys(trace["state_fingerprints"], np.asarray(greedy(logits)[0]))
  first = {key: row for row, key in reversed(list(enumerate(keys)))}
  rows = np.unique([first[keys[row]] for row in of])
  place = {keys[row]: at for at, row in enumerate(rows)}
  return logits, state, rows, np.array([place[keys[row]] for row in of])
