"""Measures of a model, on a tiny one: shapes, signs and what is not interpretable."""

import numpy as np

from moejax.training import effects
from tests.models import tiny


def test_distinct_share():
  assert effects.distinct_share([1, 2, 3, 4]) == 1
  assert effects.distinct_share([1, 2, 1, 2, 1, 2]) == 0.5  # 121 212 121 212
  assert effects.distinct_share([7, 7, 7], n=1) == 1 / 3


def test_cache_quantisation():
  model, tokens = tiny.tiny("olmoe"), tiny.draw_tokens(3)
  found = effects.cache_quantisation(model, tokens, 4, prefill=5)
  assert found["scored_tokens"] == 3 * 16 and found["sequences"] == 3
  assert set(found["flip_rate_by_layer"]) == {0, 1}
  assert np.isclose(
    found["flip_rate"], np.mean(list(found["flip_rate_by_layer"].values())), atol=1e-4
  )
  value, low, high = found["excess"]
  assert low <= value <= high
  assert (found["routed_fraction"] is None) == (low <= 0)


def test_arithmetics_agree_on_a_tiny_model():
  found = effects.arithmetic_agreement(tiny.tiny("olmoe"), tiny.draw_tokens(3))
  assert abs(found["difference"]) < 0.05 and found["same_routes"] > 0.8
  assert np.isclose(found["difference"], found["fast_nll"] - found["canonical_nll"], atol=2e-6)
