"""Forks of one event: what is frozen, which branch is which, and that each is the one run alone."""

import functools
import itertools

import jax
import numpy as np
import pytest

from moejax.combine import A, all_orders, B
from moejax.inference import (
  branch_sweep,
  branches,
  continue_forked,
  decode,
  fork,
  fork_farthest,
  freeze,
  generate,
)
from moejax.inference import sweep as sweeps
from moejax.inference.generate import continue_greedily, Generation
from moejax.models import Mode, Taps
from tests import oracles
from tests.models import tiny

PROMPT = [56, 42, 43]  # branches of the tiny OLMoE differ in output, state and text
NEW = 20  # more than one segment
LAYER = {"olmoe": 0, "deepseek_v4": 2}  # not the last: what follows must see the fork
KEY = jax.random.key(0)


def _slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@functools.cache
def event(family):
  return freeze(tiny.tiny(family), PROMPT, LAYER[family], len(PROMPT) + NEW)


@functools.cache
def sweep(family, scheme=B):
  return branch_sweep(tiny.tiny(family), event(family), scheme, NEW, key=KEY)


def alone(family, order, scheme):
  """(post-block state, tokens) of one branch: one row, its own call."""
  model, frozen = tiny.tiny(family), event(family)
  execution = branches.branch_execution(model, frozen.layer, order[None], np.array([scheme.code]))
  taps = Taps(post_block=True)
  logits, state, trace = decode(model, [frozen.token], frozen.before, execution, taps=taps)
  rest = continue_greedily(model, logits, state, NEW - 1).tokens[0]
  return np.asarray(trace["post_block"])[frozen.layer, 0, 0], [frozen.token, *rest]


@pytest.mark.parametrize(
  ("family", "scheme"),
  [("olmoe", A), ("olmoe", B), _slow("deepseek_v4", B)],
  ids=lambda value: getattr(value, "name", value),
)
def test_branches_are_told_apart_by_the_outputs_of_the_recurrence(family, scheme):
  """Without and with a shared expert, by the recurrence of the paper."""
  model, frozen = tiny.tiny(family), event(family)
  found = fork(model, frozen, scheme, key=KEY)
  classes = all_orders(5)
  if scheme is B:
    classes = classes[classes[:, 0] < classes[:, 1]]
  assert not found.sampled
  assert (found.orders == classes).all()
  operand = "bfloat16" if scheme is B else "float32"
  shared = 0 if frozen.shared is None else np.asarray(frozen.shared)
  outputs = []
  for order in found.orders:
    routed = oracles.combine(np.asarray(frozen.terms), order, operand, "bfloat16")
    outputs.append(oracles.to_bf16(routed + shared).tobytes())
  assert len(set(outputs)) == len(found.post_block) > 1
  for branch, output in enumerate(outputs):
    assert outputs[found.representatives[found.output[branch]]] == output


def test_orders_with_the_same_output_are_counted_once():
  found = fork(tiny.tiny("olmoe"), freeze(tiny.tiny("olmoe"), [35, 25, 21], 0, 8), B, key=KEY)
  assert len(found.post_block) == len(found.representatives) < len(found.orders) == 60
  assert (np.unique(found.output) == np.arange(len(found.post_block))).all()
  terms = np.asarray(found.event.terms)
  sums = [oracles.combine(terms, order, "bfloat16", "bfloat16").tobytes() for order in found.orders]
  for branch, output in enumerate(found.output):
    assert sums[branch] == sums[found.representatives[output]]
  assert len(set(sums)) == len(found.post_block)


@pytest.mark.parametrize("family", ["olmoe", _slow("deepseek_v4")])
def test_a_branch_of_a_sweep_is_the_branch_run_alone(family):
  found = sweep(family)
  assert len(found.tokens) == 60
  for branch in range(0, 60, 7):
    state, tokens = alone(family, found.fork.orders[branch], B)
    oracles.assert_same_bits(found.fork.post_block[found.fork.output[branch]], state)
    assert found.tokens[branch].tolist() == [int(token) for token in tokens]


@pytest.mark.parametrize("family", ["olmoe", _slow("deepseek_v4")])
def test_native_is_what_is_generated(family):
  assert (sweep(family).native == generate(tiny.tiny(family), [PROMPT], NEW).tokens[0]).all()
  assert (sweep(family).tokens[:, 0] == sweep(family).native[0]).all()


def test_branches_in_the_same_state_go_on_as_one(monkeypatch):
  """A lane for each distinct state after the block, fewer once complete states are equal."""
  monkeypatch.setattr(sweeps, "_FEW", 16)
  found, seen, keys = sweep("olmoe"), [], []
  real, keys_of = sweeps.emit, sweeps.state_keys
  monkeypatch.setattr(
    sweeps, "emit", lambda *args, **more: seen.append(len(args[1])) or real(*args, **more)
  )
  monkeypatch.setattr(
    sweeps, "state_keys", lambda made: keys.append(keys_of(made)) or list(keys[-1])
  )
  run, lanes = sweeps._event, []
  monkeypatch.setattr(sweeps, "_event", lambda *args: lanes.append(len(args[2])) or run(*args))
  again = branch_sweep(tiny.tiny("olmoe"), event("olmoe"), B, NEW, key=KEY)
  assert (again.tokens == found.tokens).all()
  states = len({state.tobytes() for state in found.fork.post_block})
  assert 1 < len(np.unique(found.merged)) < states < len(found.fork.post_block) <= 60
  calls = len(lanes)
  assert calls > 1 and sum(lanes) == states + 1 and seen[:calls] == [16] * calls
  # Padding repeats a lane; native may have one of its own.
  complete = len(set().union(*keys[:calls]))
  assert complete - len(np.unique(found.merged)) in (0, 1)
  assert seen[calls] == sweeps.padded(complete)
  new = itertools.count()
  monkeypatch.setattr(sweeps, "state_keys", lambda made: [b"%d" % next(new) for _ in made.tokens])
  apart = branch_sweep(tiny.tiny("olmoe"), event("olmoe"), B, NEW, key=KEY)
  assert (apart.tokens == found.tokens).all()


def test_a_complete_state_is_what_is_in_use_and_the_next_token():
  state = sweeps.spread(event("olmoe").before, 4)
  layer = state.layers[0]
  used = layer.keys.at[2, 0, 1, 0].add(1)  # row 2, position 1 of 3
  unused = used.at[3, 0, 5, 0].add(1)
  state = state.replace(layers=(layer.replace(keys=unused), *state.layers[1:]))
  tokens = np.array([[7], [8], [7], [7]], np.int32)
  keys = sweeps.state_keys(Generation(tokens, tokens > 9, state))
  assert keys[0] == keys[3] and len({keys[0], keys[1], keys[2]}) == 3


def test_lanes_that_have_become_equal_shrink_the_batch(monkeypatch):
  """Sixteen rows in two complete states: two lanes, and every row has the tokens of its own."""
  monkeypatch.setattr(sweeps, "LANES", 16)
  monkeypatch.setattr(sweeps, "_FEW", 2)
  model, frozen, found = tiny.tiny("olmoe"), event("olmoe"), sweep("olmoe")
  native, branch = found.native, int((found.tokens != found.native).any(axis=1).argmax())
  orders = np.repeat([found.fork.orders[branch], np.full(5, -1)], 8, axis=0)
  start = sweeps._event(model, frozen, orders, np.repeat([B.code, -1], 8), Mode())
  real, seen = sweeps.emit, []
  monkeypatch.setattr(
    sweeps, "emit", lambda *args, **more: seen.append(len(args[1])) or real(*args, **more)
  )
  rows = sweeps._continue(model, start.tokens, start.state, NEW - 2, Mode())
  assert seen == [16, 2]
  assert (rows[:8] == found.tokens[branch, 1:]).all() and (rows[8:] == native[1:]).all()
  assert (rows[0] != rows[8]).any()


def test_branches_beyond_what_is_in_flight_at_once_are_the_same(monkeypatch):
  monkeypatch.setattr(sweeps, "LANES", 16)
  monkeypatch.setattr(sweeps, "_FEW", 8)
  again = branch_sweep(tiny.tiny("olmoe"), event("olmoe"), B, NEW, key=KEY)
  for name in ("tokens", "merged", "native"):
    assert (getattr(again, name) == getattr(sweep("olmoe"), name)).all()


def test_the_farthest_branch_is_that_of_the_state():
  found = sweep("olmoe").fork
  branch = found.farthest()
  distance = lambda b: np.abs(found.post_block[found.output[b]] - found.event.post_block).max()
  every = [distance(b) for b in range(60)]
  assert distance(branch) == max(every) and every.index(max(every)) == branch
  forks = fork_farthest(tiny.tiny("olmoe"), [PROMPT, [8, 2, 33, 60, 1]], 0, B, NEW, key=KEY)
  assert (forks.orders[0] == found.orders[branch]).all() and forks.linf[0] == max(every)
  assert (forks.branch[0] == sweep("olmoe").tokens[branch]).all()
  assert (forks.native[0] == sweep("olmoe").native).all()


def test_a_fork_says_how_many_states_it_has():
  found = sweep("olmoe").fork
  states = [found.post_block[output].tobytes() for output in found.output]
  assert found.num_states == len(set(states))
  native = found.event.post_block.tobytes()
  assert found.unlike_native.tolist() == [state != native for state in states]


def test_one_token_is_no_continuation():
  model = tiny.tiny("olmoe")
  with pytest.raises(ValueError, match=r"at least 2 emitted tokens, got 1"):
    branch_sweep(model, event("olmoe"), B, 1, key=KEY)
  with pytest.raises(ValueError, match=r"at least 2 emitted tokens, got 1"):
    continue_forked(model, [PROMPT], 1, np.arange(5, dtype=np.int32)[None], B, 1)


def test_a_layer_without_experts_is_refused():
  with pytest.raises(ValueError, match=r"layer 0 has no routed experts; those that have: 1"):
    freeze(tiny.tiny("deepseek"), PROMPT, 0, 8)
  with pytest.raises(ValueError, match=r"layer 9 has no routed experts"):
    freeze(tiny.tiny("olmoe"), PROMPT, 9, 8)
