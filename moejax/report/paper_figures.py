"""The figures that the papers of the two studies report, to stand beside ours.

Tables and columns are named as ours are, where ours has the quantity. A row is one name, or several
joined by "/", from the widest to the narrowest:

  reduction: a scheme, a prompt, a stage or "all": "why the sheep/P32", "all/B", "8/en".
  route: a model, a disturbance and what of it, or "all": "olmoe/kv4", "olmoe/kv4/jump". An interval
    is in the columns NAME_low and NAME_high.
"""

import functools
import pathlib
from typing import NamedTuple

from moejax.report.tables import read_tsv

NOTES = {
  "reduction": (
    "The paper's figures are of DeepSeek-V4-Flash in the Colibri runtime; the model here is "
    "another one, so they show what was found there and are no target."
  ),
  "route": (
    "The paper's figures are of OLMoE-1B-7B, Qwen1.5-MoE-A2.7B, Qwen3-30B-A3B and "
    "DeepSeek-MoE-16B; the models here are other ones, so they show what was found there and are "
    "no target."
  ),
}
"""What to say where figures of a study's paper are shown, by study."""

NOTE = NOTES["reduction"]

_FOLDER = pathlib.Path(__file__).parent / "paper"


class Figure(NamedTuple):
  """A figure of a paper.

  Attributes:
    table: of ours, without ".tsv".
    row: which row of it.
    column: the quantity.
    value: as printed; words, ranges and percentages ("nine", "layers 0–5", "45%") as the number
      they stand for.
    denominator: what `value` is counted from, or "".
    where: section, appendix or picture of the paper.
  """

  table: str
  row: str
  column: str
  value: str
  denominator: str
  where: str


def figures(study: str = "reduction") -> tuple[Figure, ...]:
  """All of a study, in the order of its file."""
  if study not in NOTES:
    raise ValueError(f"expected a study of {list(NOTES)}, got {study!r}.")
  return _read(study)


def find(table: str, row: str, column: str, study: str = "reduction") -> Figure | None:
  """The figure with this key, or None where the paper has none."""
  return _by_key(study).get((table, row, column))


def beside(table: str, row: str, column: str, study: str = "reduction") -> str:
  """A cell for a table: "161/192", or the value alone; "" where the paper has no such figure."""
  figure = find(table, row, column, study)
  if figure is None:
    return ""
  return f"{figure.value}/{figure.denominator}" if figure.denominator else figure.value


@functools.cache
def _read(study: str) -> tuple[Figure, ...]:
  return tuple(Figure(**row) for row in read_tsv(_FOLDER / f"{study}.tsv"))


@functools.cache
def _by_key(study: str) -> dict[tuple[str, str, str], Figure]:
  return {figure[:3]: figure for figure in figures(study)}
