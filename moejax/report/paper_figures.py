"""The figures that the reduction paper reports, to stand beside ours.

Tables and columns are named as in `moejax.report.reduction_tables` where ours has the quantity. A
row is a scheme, a prompt, a stage or "all"; two of these are joined by "/": "why the sheep/P32",
"all/B", "8/en".
"""

import functools
import pathlib
from typing import NamedTuple

from moejax.report.tables import read_tsv

NOTE = (
  "The paper's figures are of DeepSeek-V4-Flash in the Colibri runtime; the model here is another "
  "one, so they show what was found there and are no target."
)

_FILE = pathlib.Path(__file__).parent / "paper" / "reduction.tsv"


class Figure(NamedTuple):
  """A figure of the paper.

  Attributes:
    table: of ours, without ".tsv".
    row: which row of it.
    column: the quantity.
    value: as printed; words and ranges ("nine", "layers 0–5") as the number they stand for.
    denominator: what `value` is counted from, or "".
    where: section, appendix or picture of the paper.
  """

  table: str
  row: str
  column: str
  value: str
  denominator: str
  where: str


@functools.cache
def figures() -> tuple[Figure, ...]:
  """All of them, in the order of the file."""
  return tuple(Figure(**row) for row in read_tsv(_FILE))


def find(table: str, row: str, column: str) -> Figure | None:
  """The figure with this key, or None where the paper has none."""
  return _by_key().get((table, row, column))


def beside(table: str, row: str, column: str) -> str:
  """A cell for a table: "161/192", or the value alone; "" where the paper has no such figure."""
  figure = find(table, row, column)
  if figure is None:
    return ""
  return f"{figure.value}/{figure.denominator}" if figure.denominator else figure.value


@functools.cache
def _by_key() -> dict[tuple[str, str, str], Figure]:
  return {figure[:3]: figure for figure in figures()}
