"""How far annotators agree: columns of labels of the same items, one column each.

A label is a string; a blank one (empty or white space) is a label not given.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import NamedTuple

from sklearn import metrics

Columns = Mapping[str, Sequence[str]]


class Agreement(NamedTuple):
  """Two columns: of `items` items `excluded` are blank in one or both, the others `compared`.

  `raw` is agreed / compared, NaN where nothing is compared. `kappa` is Cohen's; NaN also where
  both columns hold one and the same label throughout, since chance alone then agrees always.
  """

  first: str
  second: str
  items: int
  excluded: int
  compared: int
  agreed: int
  raw: float
  kappa: float


class Confusion(NamedTuple):
  """How many items have one label in the first column and another, or the same, in the second."""

  first: str
  second: str
  first_label: str
  second_label: str
  count: int


def pairwise_agreement(columns: Columns) -> list[Agreement]:
  """Agreement of each two columns.

  Args:
    columns: labels [items] by annotator.

  Raises:
    ValueError: fewer than two columns, or columns of different lengths.
  """
  rows = []
  for first, second, pairs in _pairs(columns):
    items, compared = len(columns[first]), len(pairs)
    agreed = sum(a == b for a, b in pairs)
    raw = kappa = float("nan")
    if pairs:
      raw = agreed / compared
    if len({label for pair in pairs for label in pair}) > 1:
      kappa = float(metrics.cohen_kappa_score(*zip(*pairs)))
    rows.append(Agreement(first, second, items, items - compared, compared, agreed, raw, kappa))
  return rows


def confusion(columns: Columns) -> list[Confusion]:
  """Counts of label pairs of each two columns, without items blank in either.

  All pairs of labels that occur in the two columns are listed, in sorted order, zeros too.
  Otherwise as `pairwise_agreement`.
  """
  rows = []
  for first, second, pairs in _pairs(columns):
    labels = sorted({label for pair in pairs for label in pair})
    for pair in itertools.product(labels, repeat=2):
      rows.append(Confusion(first, second, *pair, pairs.count(pair)))
  return rows


def consensus(columns: Columns) -> list[str]:
  """The label that all columns give an item; "" where they disagree or one is blank.

  Raises:
    ValueError: no columns, or columns of different lengths.
  """
  _check(columns, 1)
  return [
    labels[0] if len(set(labels)) == 1 and labels[0].strip() else ""
    for labels in zip(*columns.values())
  ]


def _pairs(columns: Columns):
  """(name, name, pairs of labels given by both) of each two columns."""
  _check(columns, 2)
  for first, second in itertools.combinations(columns, 2):
    both = zip(columns[first], columns[second])
    yield first, second, [(a, b) for a, b in both if a.strip() and b.strip()]


def _check(columns: Columns, fewest: int):
  if len(columns) < fewest:
    raise ValueError(f"agreement: got {len(columns)} columns of labels, expected {fewest} or more.")
  lengths = {name: len(labels) for name, labels in columns.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"agreement: columns of the same items have different lengths, {lengths}.")
