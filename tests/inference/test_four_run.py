"""The four runs: identity controls, pinned routes, and sequences that do not see each other."""

import dataclasses
from fractions import Fraction
import math

import jax
import numpy as np
import pytest

from moejax import combine, inference
from moejax.inference import (
  ActivationQuantization,
  Condition,
  four_run,
  Given,
  KvQuantization,
  Reduction,
  run_routed,
  WeightQuantization,
)
from moejax.inference.disturbances import quantize_experts
from moejax.inference.routed import kl_divergence
from moejax.models import Execution, Mode, NATIVE, Pins
from tests.models import tiny
from tests.oracles import assert_same_bits

PREFILL = 5
ROWS = 3
TOKENS = tiny.draw_tokens(3)
FOUR_BITS = KvQuantization(4)
DISTURBANCES = (
  KvQuantization(3, 0.5),
  ActivationQuantization(),
  WeightQuantization(4),
  WeightQuantization(3, 8),
  Reduction(combine.B),
)


def runs(disturbance, rows=ROWS, family="olmoe", **more):
  return four_run(tiny.tiny(family), TOKENS, disturbance, prefill=PREFILL, rows=rows, **more)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_controls_are_exactly_zero_and_the_disturbance_is_not(family):
  found = runs(FOUR_BITS, family=family)
  controls = found.controls
  assert (controls.clean_pinned, controls.disturbed_pinned, controls.idle) == (0, 0, 0)
  assert controls.sequences == len(TOKENS)
  assert (found.qf.nll != found.cc.nll).any()


@pytest.mark.parametrize("disturbance", DISTURBANCES, ids=lambda d: d.name)
def test_every_disturbance_has_its_controls(disturbance):
  found = runs(disturbance)
  assert found.controls.idle == 0
  assert (found.qf.nll != found.cc.nll).any()


def test_a_control_that_is_not_zero_is_refused():
  planted = Given("planted", *(d.condition(None, Mode(), 0, 0) for d in (FOUR_BITS,) * 2))
  with pytest.raises(ValueError, match=r"the control idle is .* nats, expected exactly 0; the con"):
    runs(planted)


def test_a_disturbance_that_is_none_changes_no_bit():
  found = runs(Given("nothing", Condition()))
  assert found.controls.idle is None
  for run in (found.qp, found.qf, found.ct):
    assert_same_bits(run.nll, found.cc.nll)
  assert not found.flips().any()


def test_sequences_do_not_see_each_other():
  found, apart = runs(FOUR_BITS), runs(FOUR_BITS, rows=2)
  assert found.cc.nll.shape == (3, tiny.TOKENS - PREFILL)
  for name in ("cc", "qp", "qf", "ct"):
    assert_same_bits(getattr(found, name).nll, getattr(apart, name).nll)
  assert (found.qf.ids == apart.qf.ids).all()
  assert (found.ct.nll != found.cc.nll).any()
  flips = found.flips()
  assert flips.shape == (2, 3, tiny.TOKENS - PREFILL) and 0 < flips.mean() < 1


def test_contrasts_add_up():
  found = runs(FOUR_BITS)
  total = found.compute + found.route_pure + found.interaction
  assert np.abs(total - found.total).max() <= 1e-12
  exact = Fraction(float(found.qf.nll[0, 0])) - Fraction(float(found.qp.nll[0, 0]))
  assert Fraction(found.route_forward[0, 0]) == exact


def test_a_pin_is_verbatim_ids_weights_and_order():
  """With all parts of the pin those of the disturbed run itself, QP is QF."""
  found, model = runs(FOUR_BITS), tiny.tiny("olmoe")
  condition = FOUR_BITS.condition(model, Mode(), *TOKENS.shape)
  run = lambda pins: run_routed(model, TOKENS, condition, pins, prefill=PREFILL, rows=ROWS)
  own = found.qf.pins()
  assert_same_bits(run(own).nll, found.qf.nll)
  assert_same_bits(found.qp.weights, found.cc.weights)
  doubled = Pins(own.ids, own.weights * 2, own.slots, own.mask)
  assert_same_bits(run(doubled).weights, own.weights * 2)  # never renormalised
  none = found.cc.pins(mask=False)
  assert_same_bits(run(none).nll, found.qf.nll)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_parallel_scoring_is_sequential_decoding(bits, chunk):
  model = tiny.tiny("olmoe")
  execution = Execution(kv_bits=np.int32(bits))
  whole = inference.score(model, TOKENS, PREFILL, execution)
  parts = inference.score(model, TOKENS, PREFILL, execution, chunk=chunk)
  assert_same_bits(parts.nll, whole.nll)


def test_expert_weights_are_on_the_grid_and_nothing_else_is_touched():
  model = tiny.tiny("olmoe")
  quantized = quantize_experts(model.params, 3)
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(model.params), jax.tree.leaves(quantized), strict=True
  )
  for (path, before), after in pairs:
    before, after = np.asarray(before, np.float32), np.asarray(after, np.float32)
    if "experts" not in jax.tree_util.keystr(path):
      assert_same_bits(before, after)
      continue
    for expert in range(len(before)):
      for row in range(before.shape[2]):  # one output of one expert
        assert len(np.unique(after[expert, :, row])) <= 7
        assert np.abs(after[expert, :, row]).max() <= np.abs(before[expert, :, row]).max()


def test_divergence_against_exact_sums():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 3, 40))
  p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  for scale in (1e-4, 0.1, 3.0):
    other = logits + scale * rng.normal(size=logits.shape)
    q = other - np.log(np.exp(other).sum(-1, keepdims=True))
    found = kl_divergence(p.astype(np.float32), q.astype(np.float32))
    for at in np.ndindex(2, 3):
      want = math.fsum(np.exp(p[at]) * (p[at] - q[at]))
      # Rounding log probabilities near 4 nats to float32 moves them by 2e-7.
      assert found[at] == pytest.approx(want, rel=5e-7 / scale + 1e-5)
  same = p.astype(np.float32)
  assert (kl_divergence(same, same) == 0).all()


def test_divergences_are_those_of_the_runs():
  found = runs(FOUR_BITS, divergence=True)
  assert found.cc.log_probabilities.shape[:2] == found.cc.nll.shape
  assert (found.qf.kl > 0).any() and (found.qf.kl >= 0).all()
  again = dataclasses.replace(found.cc, kl=None)
  assert_same_bits(runs(FOUR_BITS, divergence=True, rows=1).qp.kl, found.qp.kl)
  assert again.kl is None


def test_a_prefill_that_leaves_nothing():
  with pytest.raises(ValueError, match=r"score: prefill must be within 1 \.\. 20, got 21"):
    four_run(tiny.tiny("olmoe"), TOKENS[:2], FOUR_BITS, prefill=21)


def test_a_nan_loss_is_named():
  model = tiny.tiny("olmoe")
  params = jax.tree.map(lambda x: x, model.params)
  params["params"]["embed"] = params["params"]["embed"].at[int(TOKENS[1, 7])].set(np.nan)
  with pytest.raises(FloatingPointError, match=r"(sequence|row) \d, position \d"):
    run_routed(dataclasses.replace(model, params=params), TOKENS, prefill=PREFILL, rows=ROWS)


@pytest.mark.parametrize("make", [lambda: KvQuantization(9), lambda: KvQuantization(1)])
def test_bits_outside_the_quantiser(make):
  with pytest.raises(ValueError, match=r"a KV cache of \d bits: expected 2 to 8"):
    make()


def test_strength_one_and_zero_are_the_quantiser_and_nothing():
  model = tiny.tiny("olmoe")
  score = lambda e: inference.score(model, TOKENS, PREFILL, e).nll
  clean, whole = score(NATIVE), score(Execution(kv_bits=np.int32(4)))
  assert_same_bits(score(Execution(kv_bits=np.int32(4), kv_strength=np.float32(0))), clean)
  assert_same_bits(score(Execution(kv_bits=np.int32(4), kv_strength=np.float32(1))), whole)
  assert_same_bits(score(Execution(kv_bits=np.int32(0))), clean)
  assert (whole != clean).any()
