"""Basins against plain loops over tuples, their table, and the identity of scheme B."""

import dataclasses
import fractions

import numpy as np
import pytest

from moejax import analysis
from moejax.combine import A, all_orders, B, class_representatives, structural_classes


def sweep(seed: int, branches: int = 53, tokens: int = 7) -> np.ndarray:
  """Few different ids, so that branches meet and part at many horizons."""
  return np.random.default_rng(seed).integers(2, size=(branches, tokens)) * 70_001


def oracle(tokens, horizon: int, weights) -> list[tuple[int, list[int]]]:
  """(volume, branches) of each basin in the order of their numbers."""
  members = {}
  for branch, row in enumerate(tokens.tolist()):
    members.setdefault(tuple(row[:horizon]), []).append(branch)
  found = [(sum(weights[b] for b in branches), branches) for branches in members.values()]
  return sorted(found, key=lambda basin: (-basin[0], basin[1][0]))


@pytest.mark.parametrize("horizon", [1, 3, 7])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_basins_are_those_of_plain_loops(horizon, dtype):
  tokens = sweep(horizon)
  weights = np.random.default_rng(11).integers(1, 5, size=53)
  classes = np.arange(53) // 3
  found = analysis.basins(tokens.astype(dtype), horizon, weights=weights, classes=classes)
  expected = oracle(tokens, horizon, weights.tolist())
  assert len(expected) > 1
  assert found.order_counts.tolist() == [volume for volume, _ in expected]
  assert found.representatives.tolist() == [branches[0] for _, branches in expected]
  for basin, (_, branches) in enumerate(expected):
    assert np.flatnonzero(found.labels == basin).tolist() == branches
    assert found.class_counts[basin] == len({branch // 3 for branch in branches})


def test_ties_go_to_the_lowest_branch():
  tokens = np.array([[9, 1], [3, 1], [9, 1], [3, 1], [5, 1]])
  found = analysis.basins(tokens, 2)
  assert found.labels.tolist() == [0, 1, 0, 1, 2]
  assert found.order_counts.tolist() == [2, 2, 1]
  assert found.representatives.tolist() == [0, 1, 4]
  # A weight moves the last branch to the front.
  heavier = analysis.basins(tokens, 2, weights=np.array([1, 1, 1, 1, 3]))
  assert heavier.labels.tolist() == [1, 2, 1, 2, 0]


def test_a_longer_horizon_only_splits():
  tokens = sweep(3)
  number = [len(analysis.basins(tokens, horizon).representatives) for horizon in range(1, 8)]
  assert number == sorted(number) and number[0] < number[-1]
  short, long = analysis.basins(tokens, 2), analysis.basins(tokens, 5)
  for basin in range(len(long.representatives)):
    assert len(set(short.labels[long.labels == basin])) == 1


def test_a_hand_worked_table():
  # Orders 0 .. 5 of three classes; class 2 goes its own way.
  tokens = np.array([[4, 8], [4, 8], [4, 8], [4, 8], [4, 9], [4, 9]])
  found = analysis.basins(tokens, 2, classes=np.array([0, 1, 0, 1, 2, 2]))
  third = fractions.Fraction(1, 3)
  assert analysis.rank_frequency(found) == [
    (1, 4, 2 * third, 2, 2 * third),
    (2, 2, third, 1, third),
  ]
  assert analysis.rank_frequency(analysis.basins(tokens, 1)) == [(1, 6, 1, None, None)]


@pytest.mark.parametrize("num_terms", [2, 3, 4, 5])
def test_shares_of_scheme_b_coincide_whatever_the_classes_do(num_terms):
  orders = all_orders(num_terms)
  classes = structural_classes(orders, B)
  token = np.random.default_rng(num_terms).integers(3, size=classes.max() + 1)
  every = analysis.basins(token[classes][:, None], 1, classes=classes)
  analysis.check_scheme_b(every)
  rows = analysis.rank_frequency(every)
  assert all(row.order_share == row.class_share for row in rows)
  assert sum(row.class_share for row in rows) == 1
  # The same from one representative of each class, which stands for two orders.
  ids = structural_classes(class_representatives(num_terms, B), B)
  few = analysis.basins(token[ids][:, None], 1, weights=np.full(len(ids), 2), classes=ids)
  analysis.check_scheme_b(few)
  assert analysis.rank_frequency(few) == rows


def test_the_identity_fails_where_it_should():
  orders = all_orders(3)
  classes = structural_classes(orders, B)
  tokens = (classes % 2)[:, None]
  with pytest.raises(ValueError, match="made without classes"):
    analysis.check_scheme_b(analysis.basins(tokens, 1))
  # Scheme A: every order is a class of its own.
  single = analysis.basins(tokens, 1, classes=structural_classes(orders, A))
  with pytest.raises(ValueError, match="class 0 holds 1 orders, expected 2"):
    analysis.check_scheme_b(single)
  # Two orders of a class part.
  parted = tokens.copy()
  parted[np.flatnonzero(classes == 1)[0]] = 0
  found = analysis.basins(parted, 1, classes=classes)
  with pytest.raises(ValueError, match=r"class 1 lies in basins \[0, 1\], expected one"):
    analysis.check_scheme_b(found)
  assert any(row.order_share != row.class_share for row in analysis.rank_frequency(found))


def test_the_digest_is_of_comma_joined_decimals():
  # printf '477,3,0,12' | sha256sum
  digest = "601683cf4ecfe4c9a15c9f4978756fcf79eca56c2675dec9ce2b739f2139841f"
  assert analysis.tokens_sha256([477, 3, 0, 12]) == digest
  assert analysis.tokens_sha256(np.array([477, 3, 0, 12], np.uint16)) == digest
  others = ([477, 30, 12], [477, 3, 12], [12, 0, 3, 477], [4, 77, 3, 0, 12])
  assert digest not in map(analysis.tokens_sha256, others)


def test_arrays_of_a_record_have_their_shapes():
  found = analysis.basins(sweep(5), 3)
  shapes = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
  assert shapes.pop("classes") is None and shapes.pop("class_counts") is None
  number = len(found.representatives)
  expected = dict(labels=53, weights=53, order_counts=number, representatives=number)
  assert {name: len(array) for name, array in shapes.items()} == expected
  assert all(array.dtype == np.int64 for array in shapes.values())
  assert found.order_counts.sum() == 53


TOKENS = np.array([[1, 2], [1, 3], [1, 2]])


@pytest.mark.parametrize(
  "tokens,horizon,more,message",
  [
    (TOKENS, 0, {}, "the horizon is 0, expected 1 to 2"),
    (TOKENS, 3, {}, "the horizon is 3, expected 1 to 2"),
    (TOKENS[0], 1, {}, r"tokens must be integers \[P, T\], got int64 \(2,\)"),
    (TOKENS * 1.0, 1, {}, r"tokens must be integers \[P, T\], got float64 \(3, 2\)"),
    (TOKENS[:0], 1, {}, r"tokens must be integers \[P, T\], got int64 \(0, 2\)"),
    (-TOKENS, 1, {}, "tokens go down to -3, expected 0 or more"),
    (TOKENS, 1, dict(weights=[1, 0, 2]), "branch 1 has weight 0, expected at least 1"),
    (TOKENS, 1, dict(weights=[1, 2]), r"weights must be integers \[3\], one for each branch"),
    (TOKENS, 1, dict(weights=[1, 2, 0.5]), r"weights must be integers \[3\], .* got float64"),
    (TOKENS, 1, dict(classes=[0, 1, 2, 3]), r"classes must be integers \[3\], one for each branch"),
  ],
)
def test_bad_sweeps_are_refused(tokens, horizon, more, message):
  with pytest.raises(ValueError, match=message):
    analysis.basins(tokens, horizon, **more)


@pytest.mark.parametrize("ids", [[], [1.0], [[1]], ["1"], [True]])
def test_what_is_no_sequence_of_ids_has_no_digest(ids):
  with pytest.raises(ValueError, match=r"ids must be integers \[T\]"):
    analysis.tokens_sha256(ids)


def test_negative_ids_have_no_digest():
  with pytest.raises(ValueError, match="ids go down to -1"):
    analysis.tokens_sha256([3, -1])
