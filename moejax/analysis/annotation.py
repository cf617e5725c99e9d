"""Event direction: texts that people label blind, and what their labels make of the classes.

A unit of annotation (an item) is one unique text, not a class; labels come back to classes by exact
text. A blank label is one not given. Every labelled row says its source, a person or a rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import csv
import os
from typing import NamedTuple

import numpy as np

from moejax.analysis.agreement import consensus
from moejax.report.files import atomic_path

# Every draw here: `count` raw words; argsort, stable. Nothing but the seed and a stream number.
GENERATOR = "numpy Philox4x64-10, key (seed, stream); argsort of uint64 words, stable"
LABELS = ("hiring", "layoffs", "other")
COLUMNS = ("item", "text", "label")


class Item(NamedTuple):
  """What an annotator sees."""

  item: int
  text: str


class Labelled(NamedTuple):
  """An item with its label, "" if blank; `source` is "person" or "rule"."""

  item: int
  text: str
  label: str
  source: str


class ClassText(NamedTuple):
  """A row of the key: a structural class, how many orders it holds, its continuation."""

  class_id: int
  orders: int
  text: str


class ClassLabel(NamedTuple):
  """A class with the label that its text got; "" unless `status` is "labelled"."""

  class_id: int
  orders: int
  text: str
  label: str
  status: str
  source: str


class LabelCount(NamedTuple):
  """Volumes of a label; of the statuses "unlabelled" and "disagreeing" the label is ""."""

  source: str
  status: str
  label: str
  items: int
  classes: int
  orders: int


def blind_form(texts: Iterable[str], seed: int) -> list[Item]:
  """The unique texts in a shuffled order, numbered from 1 (paper, section 2.4.4).

  The order depends on the set of texts and the seed only: not on branches or frequencies.
  """
  unique = sorted(set(texts))
  shuffled = (unique[index] for index in _shuffled(len(unique), seed))
  return [Item(number, text) for number, text in enumerate(shuffled, start=1)]


def write_form(path: str | os.PathLike, form: Sequence[Item]) -> None:
  """Writes a form to be filled in: CSV with `COLUMNS`, labels blank."""
  write_csv(path, COLUMNS, [(item.item, item.text, "") for item in form])


def write_csv(path: str | os.PathLike, columns: Sequence[str], rows: Iterable[Sequence]) -> None:
  """Writes a table atomically as UTF-8 CSV, every cell quoted, so that texts may span lines."""
  with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([columns, *rows])


def read_form(
  path: str | os.PathLike, form: Sequence[Item], labels: Sequence[str] = LABELS
) -> list[Labelled]:
  """A form that a person filled in, in the form's order.

  Args:
    path: UTF-8 CSV with `COLUMNS`; rows in any order, a byte order mark and blank lines allowed.
    form: as it was given out.
    labels: allowed. Blank is allowed too; white space around a label is dropped.

  Raises:
    ValueError: another encoding, other columns, a row of the wrong length; or, naming the item, an
      unknown label, a changed text, an item that is missing, unknown or there twice.
  """
  try:
    with open(path, encoding="utf-8-sig", newline="") as file:
      header, *rows = [row for row in csv.reader(file) if row] or [[]]
  except UnicodeDecodeError:
    raise ValueError(f"{path}: not UTF-8; save the form as CSV in UTF-8.") from None
  if tuple(header) != COLUMNS:
    raise ValueError(f"{path}: columns are {header}, expected {list(COLUMNS)}.")
  given = {str(item.item): item for item in form}
  filled = {}
  for number, row in enumerate(rows, start=1):
    if len(row) != len(COLUMNS):
      raise ValueError(f"{path}: row {number} has {len(row)} cells for {len(COLUMNS)} columns.")
    name, text, label = row
    if name not in given:
      raise ValueError(f"{path}: item {name!r} is not in the form.")
    item = given[name]
    if item.item in filled:
      raise ValueError(f"{path}: item {name} is there twice.")
    if text != item.text:
      raise ValueError(f"{path}: the text of item {name} was changed: {text!r}.")
    label = label.strip()
    if label:
      _check_label(f"{path}: item {name}", label, labels)
    filled[item.item] = Labelled(*item, label, "person")
  for item in form:
    if item.item not in filled:
      raise ValueError(f"{path}: item {item.item} is missing.")
  return [filled[item.item] for item in form]


def apply_rule(
  form: Sequence[Item], rule: Callable[[str], str], labels: Sequence[str] = LABELS
) -> list[Labelled]:
  """Provisional labels: what a rule makes of each text, marked as a rule's.

  Raises:
    ValueError: the rule gives a label that is not one of `labels`.
  """
  rows = [Labelled(*item, rule(item.text), "rule") for item in form]
  for row in rows:
    _check_label(f"rule: item {row.item}", row.label, labels)
  return rows


def label_classes(
  forms: Sequence[Sequence[Labelled]], key: Sequence[ClassText]
) -> list[ClassLabel]:
  """Labels of classes by exact text, in the order of the key.

  The status is "labelled" where all forms give the same label, "disagreeing" where two of those
  given differ, else "unlabelled".

  Args:
    forms: one of each annotator, of the same items; all of persons, or all of rules.
    key: the texts of all classes.

  Raises:
    ValueError: no forms, forms of different items or mixed sources, a class there twice, a text
      of the key that is not in the forms, or the other way round.
  """
  if not forms or not forms[0]:
    raise ValueError("annotation: got no labelled items.")
  items = [row[:2] for row in forms[0]]
  for number, form in enumerate(forms):
    if [row[:2] for row in form] != items:
      raise ValueError(f"annotation: form {number} has other items than form 0.")
  sources = {row.source for form in forms for row in form}
  if len(sources) > 1:
    raise ValueError("annotation: labels of persons and of a rule are mixed.")
  source = sources.pop()

  agreed = consensus(
    {str(number): [row.label for row in form] for number, form in enumerate(forms)}
  )
  outcome = {}
  for rows, label in zip(zip(*forms), agreed):
    given = {row.label for row in rows} - {""}
    status = "labelled" if label else "disagreeing" if len(given) > 1 else "unlabelled"
    outcome[rows[0].text] = (label, status)

  seen = set()
  for row in key:
    if row.class_id in seen:
      raise ValueError(f"annotation: class {row.class_id} is in the key twice.")
    if row.text not in outcome:
      raise ValueError(f"annotation: the text of class {row.class_id} is not in the forms.")
    seen.add(row.class_id)
  texts = {row.text for row in key}
  for number, text in items:
    if text not in texts:
      raise ValueError(f"annotation: the text of item {number} belongs to no class.")
  return [ClassLabel(*row, *outcome[row.text], source) for row in key]


def score_forms(
  forms: Sequence[Sequence[Labelled]], key: Sequence[ClassText], labels: Sequence[str] = LABELS
) -> list[LabelCount]:
  """Volumes of each label, zeros too, then of what is unlabelled and of what is disagreed on.

  Raises:
    ValueError: as `label_classes`; or a label that is not one of `labels`.
  """
  rows = label_classes(forms, key)
  for row in rows:
    if row.label:
      _check_label(f"annotation: class {row.class_id}", row.label, labels)
  outcomes = [("labelled", label) for label in labels] + [("unlabelled", ""), ("disagreeing", "")]
  counts = []
  for outcome in outcomes:
    here = [row for row in rows if (row.status, row.label) == outcome]
    items, orders = len({row.text for row in here}), sum(row.orders for row in here)
    counts.append(LabelCount(rows[0].source, *outcome, items, len(here), orders))
  return counts


def stratified_draw(
  labels: Mapping[int, str],
  strata: Sequence[str] = ("layoffs", "hiring"),
  *,
  seed: int = 20260723,
  per_stratum: int = 5,
) -> list[int]:
  """Class ids drawn without replacement from each stratum (paper, section 2.4.4).

  Args:
    labels: label by class id, of all classes.
    strata: labels to draw from; stratum i uses stream i, so strata do not disturb each other.
    seed: of the draw, see `GENERATOR`.
    per_stratum: how many of each.

  Returns:
    Stratum after stratum, each in the order drawn.

  Raises:
    ValueError: a stratum has too few classes.
  """
  drawn = []
  for stream, stratum in enumerate(strata):
    classes = sorted(class_id for class_id, label in labels.items() if label == stratum)
    if len(classes) < per_stratum:
      raise ValueError(
        f"stratum {stratum!r} has {len(classes)} classes, expected at least {per_stratum}."
      )
    drawn += [int(classes[index]) for index in _shuffled(len(classes), seed, stream)[:per_stratum]]
  return drawn


def _shuffled(count: int, seed: int, stream: int = 0) -> list[int]:
  """0 .. count - 1 in the order that `GENERATOR` gives them."""
  if not 0 <= seed < 2**64:
    raise ValueError(f"the seed is {seed}, expected 0 to 2**64 - 1.")
  words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
  return np.argsort(words, kind="stable").tolist()


def _check_label(where: str, label: str, labels: Sequence[str]):
  if label not in labels:
    raise ValueError(f"{where} has the label {label!r}, expected one of {list(labels)}.")
