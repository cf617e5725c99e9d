"""The four runs: identity controls, pinned routes, and sequences that do not see each other."""

import pytest

from moejax.inference.four_run import Condition, four_run
from moejax.models import Mode
from tests.models import tiny
from tests.oracles import assert_same_bits

PREFILL = 5
FOUR_BITS = Condition(Mode(kv_bits=4))


def runs(condition, rows=3):
  return four_run(tiny.tiny("olmoe"), tiny.draw_tokens(3), condition, prefill=PREFILL, rows=rows)


def test_a_disturbance_that_is_none_changes_no_bit():
  found = runs(Condition())
  for name in ("qp", "qf", "ct"):
    assert_same_bits(getattr(found, name), found.cc)
  assert not found.flips().any()


def test_a_disturbance():
  found, apart = runs(FOUR_BITS), runs(FOUR_BITS, rows=1)
  assert found.cc.shape == (3, tiny.TOKENS - PREFILL)
  for name in ("cc", "qp", "qf", "ct"):
    assert_same_bits(getattr(found, name), getattr(apart, name))
  assert (found.disturbed_ids == apart.disturbed_ids).all()
  assert (found.qf != found.cc).any() and (found.ct != found.cc).any()
  flips = found.flips()
  assert flips.shape == (2, 3, tiny.TOKENS - PREFILL) and 0 < flips.mean() < 1


def test_a_prefill_that_leaves_nothing():
  with pytest.raises(ValueError, match=r"score: prefill must be within 1 \.\. 20, got 21"):
    four_run(tiny.tiny("olmoe"), tiny.draw_tokens(2), FOUR_BITS, prefill=21)
