"""Forks of one event: what is frozen, which branch is which, and that each is the one run alone."""

import functools

import jax
import numpy as np
import pytest

from moejax.combine import A, all_orders, B
from moejax.inference import branch_sweep, branches, decode, fork, fork_farthest, freeze, generate
from moejax.inference import sweep as sweeps
from moejax.inference.generate import continue_greedily
from moejax.models import Mode, Taps
from tests import oracles
from tests.models import tiny

PROMPT = [5, 17, 40]
NEW = 20  # more than one segment
LAYER = {"olmoe": 1, "deepseek_v4": 2}
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
  found, seen = sweep("olmoe"), []
  real = sweeps.emit
  monkeypatch.setattr(
    sweeps, "emit", lambda *args, **more: seen.append(len(args[1])) or real(*args, **more)
  )
  again = branch_sweep(tiny.tiny("olmoe"), event("olmoe"), B, NEW, key=KEY)
  assert (again.tokens == found.tokens).all()
  states = len({state.tobytes() for state in found.fork.post_block})
  assert len(np.unique(found.merged)) <= states <= len(found.fork.post_block) < 60
  assert seen[0] == sweeps.padded(states + 1)
  monkeypatch.setattr(sweeps, "state_keys", lambda made: [b"%d" % i for i in range(64)])
  apart = branch_sweep(tiny.tiny("olmoe"), event("olmoe"), B, NEW, key=KEY)
  assert (apart.tokens == found.tokens).all()


def test_lanes_that_have_become_equal_shrink_the_batch(monkeypatch):
  """Every row of a batch in the same state: one lane, and the tokens of all."""
  model, frozen = tiny.tiny("olmoe"), event("olmoe")
  native = sweep("olmoe").native
  orders = np.tile(np.arange(5, dtype=np.int32)[None], (8, 1))
  start = sweeps._event(model, frozen, orders * 0 - 1, np.full(8, -1), Mode())
  real, seen = sweeps.emit, []
  monkeypatch.setattr(
    sweeps, "emit", lambda *args, **more: seen.append(len(args[1])) or real(*args, **more)
  )
  rows = sweeps._continue(model, start.tokens, start.state, NEW - 2, Mode())
  assert seen == [8, 1]
  assert (rows == native[1:]).all()


def test_branches_beyond_what_is_in_flight_at_once_are_the_same(monkeypatch):
  monkeypatch.setattr(sweeps, "LANES", 16)
  again = branch_sweep(tiny.tiny("olmoe"), event("olmoe"), B, NEW, key=KEY)
  for name in ("tokens", "merged", "native"):
    assert (getattr(again, name) == getattr(sweep("olmoe"), name)).all()


def test_the_farthest_branch_is_that_of_the_state():
  found = sweep("olmoe").fork
  branch = found.farthest()
  distance = lambda b: np.abs(found.post_block[found.output[b]] - found.event.post_block).max()
  every = [distance(b) for b in range(60)]
  assert distance(branch) == max(every) and every.index(max(every)) == branch
  forks = fork_farthest(tiny.tiny("olmoe"), [PROMPT, [8, 2, 33, 60, 1]], 1, B, NEW, key=KEY)
  assert (forks.orders[0] == found.orders[branch]).all() and forks.linf[0] == max(every)
  assert (forks.branch[0] == sweep("olmoe").tokens[branch]).all()
  assert (forks.native[0] == sweep("olmoe").native).all()


def test_a_layer_without_experts_is_refused():
  with pytest.raises(ValueError, match=r"layer 0 has no routed experts; those that have: 1"):
    freeze(tiny.tiny("deepseek"), PROMPT, 0, 8)
  with pytest.raises(ValueError, match=r"layer 9 has no routed experts"):
    freeze(tiny.tiny("olmoe"), PROMPT, 9, 8)
