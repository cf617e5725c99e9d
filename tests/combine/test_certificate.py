"""The order-invariance certificate: never a false proof, and not far from the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine, numerics
from tests import oracles

SCHEMES = [combine.P32, combine.C, combine.A, combine.B]


def invariant(terms, contract):
  """Brute force: elements on which all classes agree."""
  orders = combine.class_representatives(terms.shape[0], contract)
  out = []
  for chunk in np.array_split(terms, -(-terms.shape[1] // 4096), axis=1):
    words = oracles.bits(combine.combine_all_orders(jnp.asarray(chunk), contract, orders=orders)[1])
    out.append((words == words[:1]).all(axis=0))
  return np.concatenate(out)


def spread_terms(rng, num_terms, hidden):
  """Columns whose exponents spread by 0 to 30 binades, some short significands, some zeros."""
  spread = rng.uniform(0, 30, hidden)
  terms = rng.standard_normal((num_terms, hidden)) * np.exp2(
    -spread * rng.random((num_terms, hidden))
  )
  few_bits = rng.random(hidden) < 0.4
  coarse = np.ldexp(np.rint(np.ldexp(terms, 3)), -3)
  terms = np.where(few_bits, coarse, terms).astype(np.float32)
  return np.where(rng.random((num_terms, hidden)) < 0.1, np.float32(0), terms)


def test_no_false_proof_in_100000_brute_force_cases_per_contract():
  rng = np.random.default_rng(0)
  terms = spread_terms(rng, 6, 100_000)
  for contract in SCHEMES:
    certified = combine.certify(terms, contract)
    truly = invariant(terms, contract)
    assert not (certified & ~truly).any()
    assert 500 < certified.sum() < 100_000, contract.name


@pytest.mark.parametrize("num_terms", [1, 2, 3, 4, 5])
def test_no_false_proof_for_other_numbers_of_terms(num_terms):
  rng = np.random.default_rng(num_terms)
  terms = np.concatenate(
    [spread_terms(rng, num_terms, 5000), oracles.subnormal_terms(rng, num_terms, 500)], axis=1
  )
  extreme = (rng.uniform(-1, 1, (num_terms, 500)) * 1.99 * 2.0**127).astype(np.float32)
  terms = np.concatenate([terms, extreme], axis=1)
  for contract in SCHEMES:
    certified = combine.certify(terms, contract)
    assert not (certified & ~invariant(terms, contract)).any()


def test_ordinary_bf16_terms_are_certified_under_c_only():
  terms = np.random.default_rng(1).standard_normal((6, 4096)).astype(np.float32)
  share = {c.name: combine.certify(terms, c).mean() for c in SCHEMES}
  assert share["C"] > 0.99
  assert max(share["P32"], share["A"], share["B"]) < 0.001


def test_certificate_is_tighter_than_the_exponent_rule():
  terms = spread_terms(np.random.default_rng(2), 6, 20_000)
  rule = combine.exponent_spread_rule(terms, combine.C)
  certified = combine.certify(terms, combine.C)
  assert not (rule & ~certified).any()
  assert certified.sum() > 1.05 * rule.sum() > 1000
  # The rule alone, at its edge: 13 binades for six terms are certain, 14 need not be.
  column = np.array(
    [[1.9921875, 1.9921875, 1.9921875, 1.9921875, 1.9921875, 2.0**-13 * 1.0078125]], np.float32
  ).T
  assert combine.exponent_spread_rule(column, combine.C).all()
  assert not combine.exponent_spread_rule(
    column * np.array([[1], [1], [1], [1], [1], [0.5]], np.float32), combine.C
  ).any()


def test_terms_at_the_very_edge_of_the_accumulator():
  # Integers up to 2^24: a sum of exactly 2^24 is held, one of 2^24 + 1 is not.
  edge = np.array([[2.0**24 - 1], [1], [0]], np.float32)
  beyond = np.array([[2.0**24 - 1], [1], [1]], np.float32)
  assert combine.certify(edge, combine.P32).all()
  assert not combine.certify(beyond, combine.P32).any()
  # Opposite signs are summed apart: 3 + (2^24 - 1) would not fit, but never meet.
  mixed = np.array([[2.0**24 - 1], [-3], [-1]], np.float32)
  assert combine.certify(mixed, combine.P32).all()


def test_subnormal_units_of_the_accumulator_count():
  # In units of BF16's last subnormal place: 1/2, 1/2 and 1 fit eight bits but not that place.
  column = np.array([[2.0**-134, 2.0**-134, 2.0**-133]], np.float32).T
  assert not combine.certify(column, combine.A).any()
  assert combine.certify(column, combine.P32).all()
  left, right, at = combine.counterexample(column, combine.A)
  sums = [oracles.combine(column, order, "float32", "bfloat16")[at] for order in (left, right)]
  assert sums[0] != sums[1]


def test_zeros_and_lone_terms_never_matter():
  lone = np.array([[0, 1.1, -0.0, 0]], np.float32).T
  pair = np.array([[0, 1.1, 2.0**-40, 0]], np.float32).T
  assert all(combine.certify(lone, c).all() for c in SCHEMES)
  assert [combine.certify(pair, c).all() for c in SCHEMES] == [True, True, False, True]


def test_infinities_and_nan_are_not_certified():
  columns = np.array([[np.inf, np.nan, 1], [1, 1, 1], [1, 1, 1]], np.float32)
  assert combine.certify(columns, combine.C).tolist() == [False, False, True]


def test_numpy_eager_and_jit_agree():
  rng = np.random.default_rng(3)
  terms = np.concatenate([spread_terms(rng, 6, 2000), oracles.awkward_terms(rng, 6, 500)], axis=1)
  for contract in (*SCHEMES, combine.EXACT):
    want = combine.certify(terms, contract)
    assert (np.asarray(combine.certify(jnp.asarray(terms), contract)) == want).all()
    jitted = jax.jit(combine.certify, static_argnums=1)
    assert (np.asarray(jitted(jnp.asarray(terms), contract)) == want).all()


def test_counterexamples_are_found_and_true():
  rng = np.random.default_rng(4)
  terms = spread_terms(rng, 6, 300)
  for contract in SCHEMES:
    found = combine.counterexample(terms, contract)
    assert (found is None) == invariant(terms, contract).all()
    left, right, at = found
    values = [
      oracles.combine(terms[:, at : at + 1], order, contract.operand, contract.accumulator)[0]
      for order in (left, right)
    ]
    assert values[0] != values[1]
    assert invariant(terms[:, :at], contract).all() if at else True


def test_counterexample_is_none_where_orders_agree():
  terms = np.ones((4, 3), np.float32)
  assert combine.counterexample(terms, combine.B) is None
  # Not certified, and yet no order changes a bit.
  absorbed = np.array([[1.0, 2.0**-60, 2.0**-61]], np.float32).T
  assert not combine.certify(absorbed, combine.P32).any()
  assert combine.counterexample(absorbed, combine.P32) is None


def test_counterexample_samples_many_terms():
  terms = np.random.default_rng(5).standard_normal((12, 8)).astype(np.float32)
  key = jax.random.key(0, impl="threefry2x32")
  left, right, at = combine.counterexample(terms, combine.B, num_orders=50, key=key)
  values = [
    oracles.combine(terms[:, at : at + 1], o, "bfloat16", "bfloat16")[0] for o in (left, right)
  ]
  assert values[0] != values[1]
  with pytest.raises(ValueError, match="12 terms are sampled; pass key="):
    combine.counterexample(terms, combine.B)


def test_bad_terms_get_one_sentence():
  with pytest.raises(ValueError, match=r"certify: terms must be float32 \[K, H\]"):
    combine.certify(np.ones(3, np.float32), combine.C)
  for function in (combine.certify, combine.exponent_spread_rule, combine.counterexample):
    with pytest.raises(ValueError, match=r"must be float32 \[K, H\], got float32 \(2, 3, 4\)"):
      function(np.ones((2, 3, 4), np.float32), combine.C)
  nan = np.full((2, 1), np.nan, np.float32)
  with pytest.raises(ValueError, match=r"counterexample: terms\[0, 0\] is NaN"):
    combine.counterexample(nan, combine.C)
  assert numerics.native() is not None
