"""How a table is written down: what all rows of the reduction study share, one line a column."""

from moejax.report.schema import Column, Table

_IDENTITY = (
  Column("protocol", "str", "script that made the row"),
  Column("model", "str", "name of the checkpoint"),
  Column("weights_sha256", "str", "of the weight files"),
  Column("tokenizer_sha256", "str", "of tokenizer.json"),
  Column("contract", "str", "native contract of the model in this run"),
  Column("seed", "int", "of schedules and draws"),
)
IDENTITY = tuple(column.name for column in _IDENTITY)

_KINDS = {"int", "float", "bool", "str", "text"}


def table(name: str, what: str, key: str, columns: str) -> Table:
  """A table from lines of "name kind what"; a kind with "?" is optional."""
  parsed = []
  for line in columns.strip().split("\n"):
    column, kind, meaning = line.split(maxsplit=2)
    parsed.append(Column(column, kind.removesuffix("?"), meaning, kind.endswith("?")))
    assert parsed[-1].kind in _KINDS, line
  return Table(name, what, tuple(key.split()), (*_IDENTITY, *parsed))
