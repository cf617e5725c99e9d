"""Forks: the branch is the farthest order, changes one combine, and depends on no other row."""

import functools

import jax
import numpy as np
import pytest

from moejax.combine import all_orders, B, P32
from moejax.inference import decode, generate, prefill
from moejax.inference.forks import fork_farthest
from moejax.models import Taps
from tests import oracles
from tests.models import tiny

PROMPTS = [[5, 17, 40], [8, 2, 33, 60, 1], [9, 9, 30, 14]]
NEW = 6


@functools.cache
def forks(family, layer):
  return fork_farthest(tiny.tiny(family), PROMPTS, layer, B, NEW, key=jax.random.key(0))


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe"])  # without and with a shared expert
def test_the_branch_is_the_farthest_of_all_orders(family):
  """Worked again by the recurrence of the paper, over every one of the 120 orders."""
  model, layer = tiny.tiny(family), 1
  found = forks(family, layer)
  assert found.num_orders == 120 and not found.sampled
  logits, state, _ = prefill(model, PROMPTS, 64)
  first = np.asarray(logits.argmax(axis=-1))
  taps = Taps(terms=True, shared=True, combined=True)
  _, _, trace = decode(model, first, state, taps=taps)
  for row in range(len(PROMPTS)):
    terms, native = (np.asarray(trace[name][layer, row, 0]) for name in ("terms", "combined"))
    shared = np.asarray(trace["shared"][layer, row, 0]) if "shared" in trace else 0
    distance = lambda order: np.abs(
      oracles.to_bf16(oracles.combine(terms, order, "bfloat16", "bfloat16") + shared) - native
    ).max()
    assert found.linf[row] == max(distance(order) for order in all_orders(5))
    assert found.linf[row] == distance(found.orders[row])


def test_native_tokens_and_the_first_of_a_branch_are_generated_ones():
  found = forks("olmoe", 1)
  assert (found.native == generate(tiny.tiny("olmoe"), PROMPTS, NEW).tokens).all()
  assert (found.branch[:, 0] == found.native[:, 0]).all()
  assert not found.changed(1).any()
  for horizon in range(1, NEW):
    assert (found.changed(horizon) <= found.changed(horizon + 1)).all()


def test_a_prompt_alone_has_the_branch_it_has_among_others():
  found = forks("olmoe", 1)
  for row in range(len(PROMPTS)):
    alone = fork_farthest(
      tiny.tiny("olmoe"), PROMPTS[row : row + 1], 1, B, NEW, key=jax.random.key(0)
    )
    for name in ("native", "branch", "orders", "linf"):
      assert (getattr(alone, name)[0] == getattr(found, name)[row]).all()


def test_a_layer_without_experts_is_refused():
  with pytest.raises(ValueError, match=r"layer 0 has no experts; MoE layers: \(1,"):
    fork_farthest(tiny.tiny("deepseek"), PROMPTS, 0, P32, 4, key=jax.random.key(0))
