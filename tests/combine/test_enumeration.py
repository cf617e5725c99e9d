"""All orders at once: sums, fingerprints and the number of additions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine
from moejax.combine import enumeration, reduce
from tests import oracles
from tests.oracles import assert_same_bits

SCHEMES = [combine.P32, combine.C, combine.A, combine.B]


def loop(terms, orders, contract):
  return np.stack(
    [oracles.combine(terms, o, contract.operand, contract.accumulator) for o in orders]
  )


@pytest.mark.parametrize("contract", SCHEMES, ids=lambda c: c.name)
@pytest.mark.parametrize("hidden", [1, 7, 300, 1000])
def test_720_orders_four_ways(each_isa, contract, hidden):
  terms = oracles.awkward_terms(np.random.default_rng(hidden), 6, hidden)
  orders = combine.all_orders(6)
  want = loop(terms, orders, contract)
  device = jnp.asarray(terms)
  for _ in each_isa():
    got_orders, sums = combine.combine_all_orders(device, contract)
    assert (got_orders == orders).all()
    assert_same_bits(sums, want)
  static = enumeration.StaticOrders(orders)
  assert_same_bits(enumeration.all_orders_xla(device, static, contract), want)
  naive = jax.jit(jax.vmap(reduce.fold_xla, in_axes=(None, 0, None)))
  assert_same_bits(naive(device, jnp.asarray(orders), jnp.int32(contract.code)), want)
  lanes = jax.vmap(lambda order: combine.combine(device, order, contract))
  assert_same_bits(lanes(jnp.asarray(orders)), want)


@pytest.mark.parametrize("num_terms", [1, 2, 3, 4, 5, 7])
def test_other_numbers_of_terms(each_isa, num_terms):
  terms = oracles.awkward_terms(np.random.default_rng(num_terms), num_terms, 530)
  for contract in SCHEMES:
    orders = combine.class_representatives(num_terms, contract)[::7]
    want = loop(terms, orders, contract)
    for _ in each_isa():
      assert_same_bits(
        combine.combine_all_orders(jnp.asarray(terms), contract, orders=orders)[1], want
      )
    static = enumeration.StaticOrders(orders)
    assert_same_bits(enumeration.all_orders_xla(jnp.asarray(terms), static, contract), want)


def test_listed_orders_may_repeat_and_come_in_any_order(each_isa):
  rng = np.random.default_rng(0)
  terms = rng.standard_normal((8, 77)).astype(np.float32)
  orders = np.stack([rng.permutation(8) for _ in range(50)]).astype(np.int32)
  orders = np.concatenate([orders, orders[::-1], orders[:, [1, 0, 2, 3, 4, 5, 6, 7]]])
  for contract in SCHEMES:
    want = loop(terms, orders, contract)
    for _ in each_isa():
      assert_same_bits(
        combine.combine_all_orders(jnp.asarray(terms), contract, orders=orders)[1], want
      )


def test_exact_gives_one_vector(each_isa):
  rng = np.random.default_rng(1)
  terms = (rng.standard_normal((6, 600)) * np.exp2(rng.uniform(-30, 30, (6, 600)))).astype(
    np.float32
  )
  want = oracles.exact_sum(oracles.to_bf16(terms))
  for _ in each_isa():
    sums = combine.combine_all_orders(jnp.asarray(terms), combine.EXACT)[1]
    assert_same_bits(sums, np.broadcast_to(want, (720, 600)))
  static = enumeration.StaticOrders(combine.all_orders(6)[:3])
  assert_same_bits(enumeration.all_orders_xla(jnp.asarray(terms), static, combine.EXACT)[2], want)


def test_distinct_sums_of_ordinary_terms():
  terms = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4096)), jnp.float32)
  distinct = {
    c.name: len(np.unique(oracles.bits(combine.combine_all_orders(terms, c)[1]), axis=0))
    for c in SCHEMES
  }
  assert distinct == {"P32": 360, "C": 1, "A": 720, "B": 360}


def test_numbers_of_additions():
  plan = enumeration.prefix_plan
  orders = combine.all_orders(6)
  assert plan(orders, first_pair_commutes=True).num_adds == 15 + 60 + 180 + 360 + 360 == 975
  assert plan(orders, first_pair_commutes=False).num_adds == 1956
  assert plan(orders[:1], first_pair_commutes=True).num_adds == 5
  assert plan(combine.all_orders(1), first_pair_commutes=True).num_adds == 0


@pytest.mark.parametrize("hidden", [1, 2, 7, 300, 511, 512, 513, 1000, 1023, 1024, 1025, 4096])
def test_fingerprints_of_every_width_and_instruction_set(each_isa, hidden):
  terms = oracles.awkward_terms(np.random.default_rng(hidden), 4, hidden)
  orders = combine.all_orders(4)
  for contract in (*SCHEMES, combine.EXACT):
    sums = np.asarray(combine.combine_all_orders(jnp.asarray(terms), contract)[1])
    reference = jnp.asarray(sums[5])
    want, distances = (np.asarray(x) for x in enumeration.fingerprint_xla(sums, reference))
    assert (want == nh_of_rows(sums)).all()
    with np.errstate(invalid="ignore"):
      assert_same_bits(distances, np.abs(sums - sums[5]).max(axis=1))
    for _ in each_isa():
      got_orders, prints, linf = combine.all_orders_fingerprints(
        jnp.asarray(terms), contract, reference=reference
      )
      assert (got_orders == orders).all()
      assert (np.asarray(prints) == want).all()
      assert_same_bits(linf, distances)
      alone = combine.all_orders_fingerprints(jnp.asarray(terms), contract)
      assert (np.asarray(alone[1]) == want).all() and not np.asarray(alone[2]).any()
    assert (np.asarray(enumeration.fingerprint_xla(sums, None)[0]) == want).all()


def nh_of_rows(sums):
  """The fingerprint as kernels/combine.cc words it, in Python integers."""

  def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16

  width = sums.shape[1]
  words = oracles.bits(sums)
  words = np.where(np.isnan(sums), np.uint32(0x7FC00000), words).astype(object)
  padded = np.zeros((len(words), -(-width // 1024) * 1024), object)
  padded[:, :width] = words
  out = np.zeros((len(words), 4), np.uint32)
  for stream in range(2):
    totals = np.zeros(len(words), object)
    for tile in range(padded.shape[1] // 1024):
      for j in range(0, 512, 2):
        if tile * 1024 + j >= width:
          continue
        for half, shift in ((0, 16), (1, 0)):
          factors = []
          for word in (j, j + 1):
            at = tile * 1024 + word
            left, right = (padded[:, c] >> shift & 0xFFFF for c in (at, at + 512))
            key = mix((4 * (tile * 512 + word) + 2 * half + stream + 1) % 2**32)
            factors.append((left + right * 65536 + key) % 2**32)
          totals = (totals + factors[0] * factors[1]) % 2**64
    out[:, 2 * stream] = (totals % 2**32).astype(np.uint32)
    out[:, 2 * stream + 1] = (totals // 2**32).astype(np.uint32)
  return out


def test_fingerprints_differ_exactly_where_vectors_do():
  terms = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4096)), jnp.float32)
  for contract in SCHEMES:
    sums = oracles.bits(combine.combine_all_orders(terms, contract)[1])
    prints = np.asarray(combine.all_orders_fingerprints(terms, contract)[1])
    by_vector = np.unique(sums, axis=0, return_inverse=True)[1].reshape(-1)
    by_print = np.unique(prints, axis=0, return_inverse=True)[1].reshape(-1)
    assert len(set(zip(by_vector.tolist(), by_print.tolist()))) == by_vector.max() + 1
    assert by_print.max() == by_vector.max()


def test_one_changed_bit_anywhere_changes_the_fingerprint():
  rng = np.random.default_rng(2)
  row = rng.standard_normal(700).astype(np.float32)
  changed = np.stack([row] * 201)
  words = changed.view(np.uint32)
  for i in range(1, 201):
    words[i, rng.integers(700)] ^= np.uint32(1) << np.uint32(rng.integers(31))
  prints = np.asarray(enumeration.fingerprint_xla(jnp.asarray(changed), None)[0])
  # Either 64-bit sum alone would do.
  assert (prints[1:, :2] != prints[0, :2]).any(axis=1).all()
  assert (prints[1:, 2:] != prints[0, 2:]).any(axis=1).all()


def test_vmap_over_tokens_and_contracts():
  rng = np.random.default_rng(3)
  terms = jnp.asarray(rng.standard_normal((3, 5, 40)), jnp.float32)
  for contract in SCHEMES:
    batched = jax.vmap(lambda t: combine.combine_all_orders(t, contract)[1])(terms)
    prints = jax.vmap(lambda t: combine.all_orders_fingerprints(t, contract)[1])(terms)
    for i in range(3):
      assert_same_bits(batched[i], combine.combine_all_orders(terms[i], contract)[1])
      single = combine.all_orders_fingerprints(terms[i], contract)[1]
      assert (np.asarray(prints[i]) == np.asarray(single)).all()


@pytest.mark.parametrize("contract", [*SCHEMES, combine.EXACT], ids=lambda c: c.name)
def test_jit_and_scan_give_the_eager_bits(contract):
  terms = jnp.asarray(np.random.default_rng(4).standard_normal((3, 4, 60)), jnp.float32)

  def both(terms):
    sums = combine.combine_all_orders(terms, contract)[1]
    return sums, *combine.all_orders_fingerprints(terms, contract, reference=terms[0])[1:]

  scanned = jax.lax.scan(lambda carry, t: (carry, both(t)), 0, terms)[1]
  for i in range(3):
    sums, prints, linf = both(terms[i])
    for got in (jax.jit(both)(terms[i]), [x[i] for x in scanned]):
      assert_same_bits(got[0], sums)
      assert (np.asarray(got[1]) == np.asarray(prints)).all()
      assert_same_bits(got[2], linf)


def test_nan_is_refused_with_its_index_or_let_through():
  terms = np.ones((3, 4), np.float32)
  terms[2, 1] = np.nan
  with pytest.raises(ValueError, match=r"combine_all_orders: terms\[2, 1\] is NaN"):
    combine.combine_all_orders(terms, combine.B)
  with pytest.raises(ValueError, match=r"all_orders_fingerprints: terms\[2, 1\] is NaN"):
    combine.all_orders_fingerprints(terms, combine.B)
  sums = np.asarray(combine.combine_all_orders(terms, combine.B, allow_nan=True)[1])
  assert np.isnan(sums).all(axis=0).tolist() == [False, True, False, False]
  _, prints, linf = combine.all_orders_fingerprints(
    terms, combine.A, allow_nan=True, reference=jnp.zeros(4, jnp.float32)
  )
  assert len(np.unique(np.asarray(prints), axis=0)) == 1 and np.isnan(np.asarray(linf)).all()


def test_every_nan_counts_as_one_pattern_in_a_fingerprint(each_isa):
  patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
  terms = np.ones((3, 6), np.float32)
  terms[0, :4] = patterns
  terms[:, 4] = [np.inf, -np.inf, 1]
  terms[:, 5] = [3e38, 3e38, -np.inf]
  for contract in SCHEMES:
    sums = np.array(combine.combine_all_orders(terms, contract, allow_nan=True)[1])
    assert np.isnan(sums[:, :5]).all()
    want = nh_of_rows(sums)
    assert (np.asarray(enumeration.fingerprint_xla(sums, None)[0]) == want).all()
    for _ in each_isa():
      got = combine.all_orders_fingerprints(terms, contract, allow_nan=True)[1]
      assert (np.asarray(got) == want).all()


@pytest.mark.parametrize(
  "change,message",
  [
    (dict(orders=[[0, 1, 2], [0, 2, 2]]), r"order 1, \[0, 2, 2\], is not a permutation"),
    (dict(orders=[[0, 1]]), "orders of 2 terms do not fit 3 terms"),
    (dict(orders=[0, 1, 2]), r"orders must be integers \[P, k\]"),
    (dict(terms=np.ones((9, 4), np.float32)), "9! orders; enumeration is bounded"),
    (dict(terms=np.ones((1, 3, 4), np.float32)), r"terms must be float32 \[K, H\]"),
    (
      dict(contract=combine.Contract("t", "float32", "float32", topology=combine.pairwise(3))),
      "has a tree topology; use vmap of combine",
    ),
  ],
)
def test_bad_input_gets_one_sentence(change, message):
  call = dict(terms=np.ones((3, 4), np.float32), contract=combine.B, orders=None) | change
  for function in (combine.combine_all_orders, combine.all_orders_fingerprints):
    with pytest.raises(ValueError, match=message):
      function(call["terms"], call["contract"], orders=call["orders"])
  with pytest.raises(ValueError, match=r"reference must be float32 \(4,\)"):
    combine.all_orders_fingerprints(
      np.ones((3, 4), np.float32), combine.B, reference=jnp.zeros(3, jnp.float32)
    )


def test_enumeration_bound_is_factorial_of_eight():
  assert len(combine.all_orders(8)) == math.factorial(8)
