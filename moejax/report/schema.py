"""Tables with a schema: columns, types, units and key, shared by writer, reader and audit.

A cell is text: integers in decimal, floats with the digits that give the same double back, booleans
as 0 and 1, and nothing for a value that there is none of.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import numbers
import os
import pathlib
from typing import Any

import numpy as np

from moejax.report.tables import read_tsv, write_tsv

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
  """A column.

  Attributes:
    name: of the header.
    kind: "int", "float", "bool", "str" or "text". A text may hold any character; tabs, line breaks
      and backslashes are escaped as in Python.
    what: what a cell holds, with its unit.
    optional: whether a cell may be empty (None).
  """

  name: str
  kind: str
  what: str
  optional: bool = False

  def format(self, value: Any) -> str:
    """The cell of a value; refuses one of another type."""
    if value is None and self.optional:
      return ""
    if isinstance(value, bool | np.bool_) != (self.kind == "bool") or not isinstance(
      value, _TYPES[self.kind]
    ):
      raise ValueError(f"{self.name}: {value!r} is no {self.kind}.")
    if self.kind == "bool":
      return str(int(value))
    if self.kind == "float":
      return repr(float(value))
    if self.kind == "text":
      return value.encode("unicode_escape").decode() if set(value) & set("\t\r\n\\") else value
    return str(value)

  def parse(self, cell: str) -> Any:
    """The value of a cell."""
    if cell == "" and self.optional:
      return None
    try:
      if self.kind == "bool":
        return {"0": False, "1": True}[cell]
      if self.kind == "text":
        return _unescape(cell)
      return {"int": int, "float": float, "str": str}[self.kind](cell)
    except (ValueError, KeyError):
      raise ValueError(f"{self.name}: {cell!r} is no {self.kind}.") from None


_TYPES = dict(int=numbers.Integral, float=numbers.Real, bool=bool | np.bool_, str=str, text=str)


def _unescape(cell: str) -> str:
  if "\\" not in cell:
    return cell
  return cell.encode("latin-1", "backslashreplace").decode("unicode_escape")


@dataclasses.dataclass(frozen=True)
class Table:
  """A table.

  Attributes:
    name: of the file, without ".tsv".
    what: one sentence.
    key: names of the columns that tell rows apart.
    columns: in order.
  """

  name: str
  what: str
  key: tuple[str, ...]
  columns: tuple[Column, ...]

  def __post_init__(self):
    names = [column.name for column in self.columns]
    if len(set(names)) < len(names) or not set(self.key) <= set(names):
      raise ValueError(f"table {self.name}: columns must differ, and the key be some of them.")

  def path(self, folder: str | os.PathLike) -> pathlib.Path:
    return pathlib.Path(folder) / f"{self.name}.tsv"

  def check(self, rows: Sequence[Row]) -> None:
    """Refuses rows that share a key.

    Raises:
      ValueError: names the key.
    """
    seen = set()
    for row in rows:
      key = tuple(row[name] for name in self.key)
      if key in seen:
        raise ValueError(f"{self.name}: two rows have the key {dict(zip(self.key, key))}.")
      seen.add(key)

  def write(self, folder: str | os.PathLike, rows: Iterable[Row]) -> None:
    """Writes the whole table atomically.

    Raises:
      ValueError: a missing or unknown column, a value of another type, a repeated key.
    """
    rows = list(rows)
    names = [column.name for column in self.columns]
    for row in rows:
      if set(row) != set(names):
        odd = sorted(set(row) ^ set(names))[0]
        raise ValueError(f"{self.name}: column {odd} is missing or unknown.")
    self.check(rows)
    cells = ([column.format(row[column.name]) for column in self.columns] for row in rows)
    write_tsv(self.path(folder), names, cells)

  def read(self, folder: str | os.PathLike) -> list[Row]:
    """Rows as they were written.

    Raises:
      FileNotFoundError: no such table.
      ValueError: other columns, a cell that does not parse, a repeated key.
    """
    path = self.path(folder)
    if not path.is_file():
      raise FileNotFoundError(f"{path}: no such table.")
    found = read_tsv(path)
    names = [column.name for column in self.columns]
    header = path.read_text(encoding="utf-8").split("\n", 1)[0].split("\t")
    if header != names:
      raise ValueError(f"{path}: columns are {header}, expected {names}.")
    try:
      rows = [{c.name: c.parse(cells[c.name]) for c in self.columns} for cells in found]
      self.check(rows)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None
    return rows


def columns(text: str) -> tuple[Column, ...]:
  """Columns from lines of "name kind what"; a kind with "?" is optional."""
  parsed = []
  for line in text.strip().split("\n"):
    name, kind, what = line.split(maxsplit=2)
    parsed.append(Column(name, kind.removesuffix("?"), what, kind.endswith("?")))
    assert parsed[-1].kind in _TYPES, line
  return tuple(parsed)


def readme(title: str, tables: Iterable[Table]) -> str:
  """A description of tables and their columns, in Markdown."""
  lines = [f"# {title}", ""]
  lines += ["Tab-separated UTF-8, one header row. Booleans are 0 and 1; an empty cell is no value."]
  for table in tables:
    lines += ["", f"## {table.name}.tsv", "", f"{table.what} Key: {', '.join(table.key)}.", ""]
    lines += ["| column | type | what |", "| --- | --- | --- |"]
    for c in table.columns:
      kind = f"{c.kind}, or none" if c.optional else c.kind
      lines.append(f"| {c.name} | {kind} | {c.what} |")
  return "\n".join(lines) + "\n"
