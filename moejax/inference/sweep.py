"""Branch sweeps: the greedy continuations of hundreds of branches of one event.

Branches with the same state after the block are one lane, and lanes whose complete states have
become equal bit for bit are continued once. The prefix is computed and kept once; it is laid out
for `LANES` branches at a time, and every call uses the memory of the last one again.
"""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import Contract
from moejax.inference.branches import (
  branch_execution,
  check_horizon,
  distinct,
  Event,
  Fork,
  fork,
)
from moejax.inference.forward import LoadedModel
from moejax.inference.generate import emit, Generation
from moejax.models import Mode, PersistentState
from moejax.models.execution import DEFAULT

# Branches that are in flight at once: memory is that of so many states, however many there are.
LANES = 128
# Two sizes are compiled, this one and LANES. An event is run this many branches at a time; mostly
# no more complete states are left after it.
_FEW = 32
# Tokens after which branches are looked through for complete states that have become equal.
_SEGMENT = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
  """A fork whose branches all went on greedily.

  Attributes:
    fork: the branches.
    merged: int [P], which distinct complete state (persistent state and next token) each branch
      had when its event was over, by first appearance.
    tokens: int32 [P, N], emitted; the first is the one the event reads.
    native: int32 [N].
  """

  fork: Fork
  merged: np.ndarray
  tokens: np.ndarray
  native: np.ndarray


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

  Args:
    num_tokens: N ≥ 2 emitted tokens, the first of which the event reads.
  """
  check_horizon(num_tokens)
  found = fork(model, event, scheme, key=key, orders=orders, mode=mode)
  first, state = distinct(found.post_block)
  # Native is a lane like the others, the last one.
  orders = found.orders[found.representatives[first]]
  orders = np.concatenate([orders, np.full_like(orders[:1], -1)])
  codes = np.append(np.full(len(first), scheme.code), -1)
  known: dict[bytes, int] = {}
  merged, waiting, rows = [], [], []
  for lanes in np.array_split(np.arange(len(codes)), -(-len(codes) // _FEW)):
    step = _event(model, event, orders[lanes], codes[lanes], mode)
    new = []
    for lane, print_ in enumerate(state_keys(step)[: len(lanes)]):
      if print_ not in known:
        known[print_] = len(known)
        new.append(lane)
      merged.append(known[print_])
    # Few are left of many: what is left of several calls goes on as one.
    if sum(len(tokens) for tokens, _ in waiting) + len(new) > LANES:
      rows.append(_continue(model, *_join(waiting), num_tokens - 2, mode))
      waiting = []
    if new:
      waiting.append((step.tokens[new], step.state.rows(np.array(new))))
  rows.append(_continue(model, *_join(waiting), num_tokens - 2, mode))
  tokens = np.concatenate(rows)[np.array(merged)]
  tokens = np.concatenate([np.full((len(tokens), 1), event.token, np.int32), tokens], axis=1)
  lane = state[found.output]
  return Sweep(found, np.array(merged)[lane], tokens[lane], tokens[-1])


def padded(lanes: int) -> int:
  """Lanes to run for so many."""
  return _FEW if lanes <= _FEW else LANES


def spread(state: PersistentState, lanes: int) -> PersistentState:
  """One row for each of some lanes."""
  return jax.tree.map(lambda x: jnp.repeat(x, lanes, axis=0), state)


def _event(model, event: Event, orders, codes, mode) -> Generation:
  """The event with orders [n, K] and codes [n] in its layer; padding repeats the last lane."""
  rows = np.minimum(np.arange(padded(len(orders))), len(orders) - 1)
  execution = branch_execution(model, event.layer, orders[rows], codes[rows])
  token, state = np.full(len(rows), event.token), spread(event.before, len(rows))
  return emit(model, token, state, 1, execution, mode=mode, donate=True)


def state_keys(made: Generation) -> list[bytes]:
  """A key for each row's complete state: persistent state, and the token it reads next."""
  # On the host: a program for it would take as long to compile as the model.
  parts = [part for layer in made.state.parts() for part in layer]
  values = [(np.asarray(part.array), part.rows) for part in parts]
  keys = []
  for row, token in enumerate(made.tokens[:, -1]):
    digest = hashlib.sha256(token.tobytes())
    for x, rows in values:
      used = x[row] if rows is None else x[row, ..., : int(rows[row]), :]
      digest.update(np.ascontiguousarray(used).view(np.uint8))
    keys.append(digest.digest())
  return keys


def _join(waiting) -> tuple[np.ndarray, PersistentState]:
  """Tokens int32 [n, 1] and states as one batch."""
  tokens, states = zip(*waiting)
  return np.concatenate(tokens), jax.tree.map(lambda *x: jnp.concatenate(x), *states)


def _continue(model, tokens, state: PersistentState, num_tokens: int, mode) -> np.ndarray:
  """int32 [n, 1 + num_tokens]: tokens [n, 1] and the greedy ones that follow in their states."""
  pieces, left = [tokens], num_tokens
  token, at, size = tokens[:, 0], np.arange(len(tokens)), None
  while left:
    rows = np.unique(at)
    if size is None or padded(len(rows)) < size:
      size, at = padded(len(rows)), np.searchsorted(rows, at)
      rows = rows[np.minimum(np.arange(size), len(rows) - 1)]
      token, state = token[rows], state.rows(rows)
    count = min(_SEGMENT, left)
    none = np.full((size, model.config.top_k), -1)
    execution = branch_execution(model, 0, none, none[:, 0])  # as an event has: one program
    made = emit(model, token, state, count, execution, mode=mode, donate=True)
    pieces.append(made.tokens[at])
    left -= count
    token, state = made.tokens[:, -1], made.state
    if left:
      at = _merge(made)[at]
  return np.concatenate(pieces, axis=1)


def _merge(made: Generation) -> np.ndarray:
  """int [B]: for each row the first one in the same complete state."""
  keys = state_keys(made)
  first = {key: row for row, key in reversed(list(enumerate(keys)))}
  return np.array([first[key] for key in keys])
