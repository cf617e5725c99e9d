"""What reordering does, counted against loops."""

import numpy as np
import pytest

from moejax import combine
from tests import oracles


@pytest.mark.parametrize("name", list(combine.SCHEMES))
def test_spread_equals_a_loop_over_orders(name):
  contract = combine.named(name)
  rng = np.random.default_rng(0)
  terms = (rng.standard_normal((4, 300)) * np.exp2(rng.uniform(-9, 0, (4, 300)))).astype(np.float32)
  orders = combine.all_orders(4)
  spread = combine.measure_spread(terms, contract, orders)
  exact = oracles.exact_sum(oracles.to_bf16(terms))
  if contract.accumulator == "exact":
    sums = np.stack([exact] * 24)
  else:
    sums = np.stack(
      [oracles.combine(terms, o, contract.operand, contract.accumulator) for o in orders]
    )
  assert spread.num_outputs == len(np.unique(oracles.bits(sums), axis=0))
  for i in range(24):  # numbered as they first appear
    first = next(j for j in range(24) if (sums[j] == sums[i]).all())
    assert spread.outputs[i] == spread.outputs[first]
  oracles.assert_same_bits(spread.linf, np.abs(sums - exact).max(axis=1))
  steps = np.abs(position(oracles.to_bf16(sums)) - position(oracles.to_bf16(exact)))
  assert (spread.ulps_max == steps.max(axis=1)).all()
  np.testing.assert_array_equal(spread.ulps_mean, steps.sum(axis=1) / 300)
  assert (spread.invariant == (sums == sums[0]).all(axis=0)).all()
  assert not (spread.certified & ~spread.invariant).any()
  assert spread.num_classes == {"A": 24, "EXACT": 1}.get(name, 12)


def position(x):
  """Number of BF16 values between 0 and x, signed."""
  words = x.view(np.uint32).astype(np.int64) >> 16
  return np.where(words >= 1 << 15, -(words - (1 << 15)), words)


def test_wide_terms_are_measured_in_pieces():
  terms = np.random.default_rng(1).standard_normal((3, 9000)).astype(np.float32)
  orders = combine.all_orders(3)
  whole = combine.measure_spread(terms, combine.B, orders)
  parts = [
    combine.measure_spread(terms[:, at], combine.B, orders)
    for at in (slice(0, 5000), slice(5000, 9000))
  ]
  assert (whole.ulps_max == np.maximum(*(p.ulps_max for p in parts))).all()
  assert (whole.invariant == np.concatenate([p.invariant for p in parts])).all()
