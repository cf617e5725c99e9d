"""Tables as tab-separated UTF-8 text with one header row."""

from collections.abc import Iterable, Sequence
import os

from moejax.report.files import atomic_path


def write_tsv(path: str | os.PathLike, columns: Sequence[str], rows: Iterable[Sequence]) -> None:
  """Writes rows atomically; cells are str() of their values.

  Raises:
    ValueError: a row of the wrong length, or a cell with a tab or a line break in it.
  """
  with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
    for number, row in enumerate((columns, *rows)):
      cells = [str(cell) for cell in row]
      if len(cells) != len(columns):
        raise ValueError(f"{path}: row {number} has {len(cells)} cells for {len(columns)} columns.")
      for column, cell in zip(columns, cells):
        if any(mark in cell for mark in "\t\r\n"):
          raise ValueError(
            f"{path}: row {number}, {column}: a cell may not hold a tab or line break."
          )
      file.write("\t".join(cells) + "\n")


def read_tsv(path: str | os.PathLike) -> list[dict[str, str]]:
  """Rows of a table as dicts of strings.

  Raises:
    ValueError: an empty file, or a row of the wrong length.
  """
  with open(path, encoding="utf-8", newline="") as file:
    lines = file.read().split("\n")
  if not lines[0]:
    raise ValueError(f"{path}: expected a header row of column names.")
  columns = lines[0].split("\t")
  rows = []
  for number, line in enumerate(lines[1:-1], start=2):
    cells = line.split("\t")
    if len(cells) != len(columns):
      raise ValueError(f"{path}: line {number} has {len(cells)} cells for {len(columns)} columns.")
    rows.append(dict(zip(columns, cells)))
  if lines[-1]:
    raise ValueError(f"{path}: the last line is not finished.")
  return rows
