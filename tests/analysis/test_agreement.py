"""Agreement: kappa from its definition in rationals, hand-worked columns, blanks."""

import fractions
import itertools
import math

import numpy as np
import pytest

from moejax.analysis import agreement


def exact_kappa(first, second) -> fractions.Fraction:
  """(p_o - p_e) / (1 - p_e) of columns without blanks."""
  size = len(first)
  observed = fractions.Fraction(sum(a == b for a, b in zip(first, second)), size)
  chance = sum(
    fractions.Fraction(first.count(label) * second.count(label), size**2) for label in set(first)
  )
  return (observed - chance) / (1 - chance)


def random_columns(seed: int, number: int = 3, items: int = 41) -> dict[str, list[str]]:
  rng = np.random.default_rng(seed)
  truth = rng.integers(3, size=items)
  names = ["hiring", "layoffs", "other", ""]
  columns = {}
  for annotator in range(number):
    noise = rng.random(items) < 0.4
    columns[f"a{annotator}"] = [
      names[rng.integers(4) if noisy else label] for noisy, label in zip(noise, truth)
    ]
  return columns


@pytest.mark.parametrize("seed", range(4))
def test_every_pair_is_counted_as_by_plain_loops(seed):
  columns = random_columns(seed)
  rows = agreement.pairwise_agreement(columns)
  assert [(row.first, row.second) for row in rows] == list(itertools.combinations(columns, 2))
  for row in rows:
    first, second = [], []
    for a, b in zip(columns[row.first], columns[row.second]):
      if a != "" and b != "":
        first.append(a)
        second.append(b)
    agreed = sum(a == b for a, b in zip(first, second))
    assert 0 < len(first) < 41
    assert row[2:6] == (41, 41 - len(first), len(first), agreed)
    assert row.raw == agreed / len(first)
    assert math.isclose(row.kappa, exact_kappa(first, second), rel_tol=1e-12)


def test_a_hand_worked_kappa():
  # Cohen's two-way table 20, 5 / 10, 15: p_o = 0.7, p_e = 0.5, kappa = 0.4.
  table = {("y", "y"): 20, ("y", "n"): 5, ("n", "y"): 10, ("n", "n"): 15}
  first, second = zip(*(pair for pair, count in table.items() for _ in range(count)))
  columns = dict(first=first, second=second)
  (row,) = agreement.pairwise_agreement(columns)
  assert row[:6] == ("first", "second", 50, 0, 50, 35) and row.raw == 0.7
  assert math.isclose(row.kappa, 0.4, rel_tol=1e-12)
  found = {(row.first_label, row.second_label): row.count for row in agreement.confusion(columns)}
  assert found == table


def test_the_six_items_of_the_paper():
  # Section 3.3: 6/6, kappa 1.
  labels = ["hiring", "layoffs", "other", "layoffs", "hiring", "other"]
  (row,) = agreement.pairwise_agreement(dict(a=labels, b=list(labels)))
  assert (row.compared, row.agreed, row.raw, row.kappa) == (6, 6, 1.0, 1.0)


def test_swapping_columns_turns_the_confusion_over():
  columns = random_columns(7, number=2)
  turned = dict(reversed(columns.items()))
  table = {row[2:4]: row.count for row in agreement.confusion(columns)}
  assert len(table) == 9 and sum(table.values()) < 41
  for row in agreement.confusion(turned):
    assert row.count == table[row.second_label, row.first_label]
  assert any(table[pair] != table[pair[::-1]] for pair in table)


def test_confusion_lists_zeros_and_no_blanks():
  columns = dict(a=["x", "x", "", "y"], b=["x", "x", "x", " "])
  assert agreement.confusion(columns) == [("a", "b", "x", "x", 2)]
  columns = dict(a=["x", "x", "", "z"], b=["x", "y", "x", "x"])
  assert [row.count for row in agreement.confusion(columns)] == [1, 1, 0, 0, 0, 0, 1, 0, 0]


def test_one_label_throughout_has_no_kappa():
  (row,) = agreement.pairwise_agreement(dict(a=["x", "x", ""], b=["x", "x", "y"]))
  assert row[2:7] == (3, 1, 2, 2, 1.0) and math.isnan(row.kappa)
  (row,) = agreement.pairwise_agreement(dict(a=["x", "x"], b=["y", "y"]))
  assert (row.raw, row.kappa) == (0.0, 0.0)


def test_nothing_compared_has_neither():
  (row,) = agreement.pairwise_agreement(dict(a=["x", "\t"], b=["", "y"]))
  assert row[2:6] == (2, 2, 0, 0) and math.isnan(row.raw) and math.isnan(row.kappa)


def test_consensus_is_blank_on_disagreement_or_blank():
  columns = dict(
    a=["x", "x", "x", "", " ", "y"], b=["x", "y", "", "", " ", "y"], c=["x", "x", "x", "", " ", "y"]
  )
  assert agreement.consensus(columns) == ["x", "", "", "", "", "y"]
  assert agreement.consensus(dict(a=columns["a"])) == ["x", "x", "x", "", "", "y"]


@pytest.mark.parametrize("function", [agreement.pairwise_agreement, agreement.confusion])
def test_one_column_is_refused(function):
  with pytest.raises(ValueError, match="got 1 columns of labels, expected 2 or more"):
    function(dict(a=["x"]))


@pytest.mark.parametrize(
  "function", [agreement.pairwise_agreement, agreement.confusion, agreement.consensus]
)
def test_bad_columns_are_refused(function):
  with pytest.raises(ValueError, match=r"different lengths, \{'a': 1, 'b': 2\}"):
    for _ in function(dict(a=["x"], b=["x", "y"])):
      pass
  with pytest.raises(ValueError, match="got 0 columns"):
    function({})
