"""Orders, their numbers and their structural classes; schedules of orders."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine
from moejax.combine import orders as orders_lib
from tests import oracles

FIVE = list(combine.SCHEMES.values())


@pytest.mark.parametrize("num_terms", range(1, 9))
def test_all_orders_are_lexicographic_and_numbered(num_terms):
  orders = combine.all_orders(num_terms)
  assert orders.dtype == np.int32 and len(orders) == math.factorial(num_terms)
  assert (combine.lexicographic_rank(orders) == np.arange(len(orders))).all()
  if num_terms < 7:
    assert orders.tolist() == sorted(map(list, itertools.permutations(range(num_terms))))


def test_numbering_of_long_orders():
  last = np.arange(16)[::-1][None]
  assert combine.lexicographic_rank(last)[0] == math.factorial(16) - 1


def test_six_terms_have_360_classes_except_under_a():
  orders = combine.all_orders(6)
  counts = {c.name: len(np.unique(combine.structural_classes(orders, c))) for c in FIVE}
  assert counts == {"P32": 360, "C": 360, "A": 720, "B": 360, "EXACT": 1}
  sizes = np.bincount(combine.structural_classes(orders, combine.B))
  assert (sizes == 2).all()


@pytest.mark.parametrize("contract", FIVE, ids=lambda c: c.name)
@pytest.mark.parametrize("num_terms", range(1, 7))
def test_class_ids_count_representatives(contract, num_terms):
  orders = combine.all_orders(num_terms)
  classes = combine.structural_classes(orders, contract)
  representatives = combine.class_representatives(num_terms, contract)
  own = combine.structural_classes(representatives, contract)
  assert (own == np.arange(len(representatives))).all()
  assert set(classes.tolist()) == set(own.tolist())
  # The lowest order of each class is its representative.
  first = [orders[np.argmax(classes == c)].tolist() for c in own]
  assert first == representatives.tolist()


@pytest.mark.parametrize("contract", FIVE[:4], ids=lambda c: c.name)
def test_fast_numbering_agrees_with_the_proof(contract):
  orders = combine.all_orders(5)
  classes = combine.structural_classes(orders, contract)
  forms = [repr(orders_lib.expression(order, contract)) for order in orders]
  by_class = {}
  for number, form in zip(classes.tolist(), forms):
    assert by_class.setdefault(number, form) == form
  assert len(set(by_class.values())) == len(by_class)


def test_classes_keep_their_bits_on_awkward_terms():
  rng = np.random.default_rng(0)
  terms = oracles.awkward_terms(rng, 5, 400)
  orders = combine.all_orders(5)
  for contract in FIVE[:4]:
    classes = combine.structural_classes(orders, contract, terms)
    sums = np.stack(
      [oracles.combine(terms, o, contract.operand, contract.accumulator) for o in orders]
    )
    words = oracles.bits(sums)
    for number in np.unique(classes):
      members = words[classes == number]
      assert (members == members[0]).all()
    # And no coarser split would do: the classes differ somewhere.
    if contract is not combine.C:
      assert len(np.unique(words, axis=0)) == classes.max() + 1


@pytest.mark.parametrize(
  "topology,ranks",
  [
    (combine.pairwise(5), None),
    (combine.fixed_tree(((0, (1, 2)), (3, 4))), None),
    (combine.expert_parallel(2), [0, 1, 0, 1, 0]),
    (combine.expert_parallel(3, "tree"), [0, 1, 2, 0, 0]),
    (combine.expert_parallel(3, "ring"), [0, 1, 2, 0, 0]),
  ],
)
@pytest.mark.parametrize("scheme", FIVE[:4], ids=lambda c: c.name)
def test_classes_of_other_topologies_keep_their_bits(topology, ranks, scheme):
  contract = dataclasses.replace(scheme, topology=topology)
  rng = np.random.default_rng(1)
  terms = jnp.asarray(rng.standard_normal((5, 200)), jnp.float32)
  orders = combine.all_orders(5)
  classes = combine.structural_classes(orders, contract, ranks=ranks)
  assert 1 < classes.max() + 1 < 120
  given = None if ranks is None else jnp.asarray(ranks, jnp.int32)
  sums = jax.vmap(lambda o: combine.combine(terms, o, contract, ranks=given))(jnp.asarray(orders))
  words = oracles.bits(sums)
  for number in np.unique(classes):
    members = words[classes == number]
    assert (members == members[0]).all()


def test_declines_what_it_cannot_prove():
  nan = np.array([[1.0], [np.nan]], np.float32)
  with pytest.raises(ValueError, match="declined, a term is NaN"):
    combine.structural_classes([[0, 1]], combine.B, nan)
  with pytest.raises(ValueError, match="declined, 17 terms"):
    combine.structural_classes([list(range(17))], combine.B)
  with pytest.raises(ValueError, match=r"9! orders; enumeration is bounded to 1 \.\. 8 terms"):
    combine.all_orders(9)
  with pytest.raises(ValueError, match="needs the rank of each term"):
    combine.structural_classes(
      [[0, 1]], dataclasses.replace(combine.B, topology=combine.expert_parallel(2))
    )


def test_samples_are_distinct_sorted_and_repeatable():
  key = jax.random.key(20260722, impl="threefry2x32")
  for contract, count in ((combine.A, 720), (combine.B, 360)):
    drawn = combine.sample_orders(8, count, contract, key=key)
    ranks = combine.lexicographic_rank(drawn)
    assert (np.diff(ranks) > 0).all() and drawn.shape == (count, 8)
    assert len(np.unique(combine.structural_classes(drawn, contract))) == count
    assert (drawn == combine.sample_orders(8, count, contract, key=key)).all()
  everything = combine.sample_orders(4, 12, combine.B, key=key)
  assert everything.tolist() == combine.class_representatives(4, combine.B).tolist()
  with pytest.raises(ValueError, match="13 orders asked for, 12 exist"):
    combine.sample_orders(4, 13, combine.B, key=key)


def test_samples_are_uniform_over_classes():
  key = jax.random.key(0, impl="threefry2x32")
  firsts = np.concatenate(
    [
      combine.sample_orders(5, 6, combine.A, key=jax.random.fold_in(key, i))[:, 0]
      for i in range(200)
    ]
  )
  # 1,200 draws over five first terms: 240 expected each, standard deviation 14.
  assert (np.abs(np.bincount(firsts, minlength=5) - 240) < 70).all()


def test_schedules_come_from_their_numbers_alone():
  whole = combine.schedule(20260722, 7, 43, 6)
  assert whole.shape == (43, 6) and (np.sort(whole, axis=1) == np.arange(6)).all()
  assert (combine.schedule(20260722, 7, 5, 6) == whole[:5]).all()
  with jax.threefry_partitionable(False):
    assert (combine.schedule(20260722, 7, 43, 6) == whole).all()
  # Stored schedules must stay what they are.
  assert combine.schedule(20260722, 0, 2, 6).tolist() == [[0, 4, 3, 1, 2, 5], [0, 1, 4, 3, 2, 5]]


def test_schedules_differ_between_layers_requests_and_seeds():
  schedules = [combine.schedule(s, r, 43, 6) for s in (1, 2) for r in range(3)]
  assert len({x.tobytes() for x in schedules}) == 6
  assert len(np.unique(schedules[0], axis=0)) > 30
  with pytest.raises(ValueError, match="schedule: declined, 0 terms"):
    combine.schedule(1, 1, 3, 0)


def test_dynamic_schedules_come_from_their_numbers_alone():
  whole = combine.dynamic_schedule(20260722, 7, 5, 40, 6)
  assert whole.dtype == np.int32 and whole.shape == (5, 40, 6)
  assert (np.sort(whole, axis=2) == np.arange(6)).all()
  assert (combine.dynamic_schedule(20260722, 7, 2, 3, 6) == whole[:2, :3]).all()
  with jax.threefry_partitionable(False):
    assert (combine.dynamic_schedule(20260722, 7, 5, 40, 6) == whole).all()
  # The documented generator, one key at a time.
  key = jax.random.key(20260722, impl="threefry2x32")
  for number in (7, 3, 31):  # request, layer, position
    key = jax.random.fold_in(key, number)
  with jax.threefry_partitionable(True):
    words = np.asarray(jax.random.bits(key, (6,), np.uint32)).tolist()
  assert whole[3, 31].tolist() == sorted(range(6), key=words.__getitem__)
  # Stored schedules must stay what they are.
  stored = combine.dynamic_schedule(20260722, 0, 2, 3, 6)
  assert stored[0, :2].tolist() == [[1, 5, 0, 4, 3, 2], [3, 4, 0, 1, 2, 5]]


def test_dynamic_schedules_differ_between_positions_layers_requests_and_seeds():
  schedules = [combine.dynamic_schedule(s, r, 4, 50, 6) for s in (1, 2) for r in range(3)]
  assert len({x.tobytes() for x in schedules}) == 6
  for layer in schedules[0]:
    assert len(np.unique(layer, axis=0)) > 35  # of 720, 50 draws: 48 are expected
  assert len({layer.tobytes() for layer in schedules[0]}) == 4
  with pytest.raises(ValueError, match="dynamic_schedule: declined, 17 terms"):
    combine.dynamic_schedule(1, 1, 3, 2, 17)
