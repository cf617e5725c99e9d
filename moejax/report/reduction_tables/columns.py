"""How a table is written down: what all rows of the reduction study share, one line a column."""

from moejax.report.schema import columns, Table

_IDENTITY = columns("""
protocol str script that made the row
model str name of the checkpoint
weights_sha256 str of the weight files
tokenizer_sha256 str of tokenizer.json
contract str native contract of the model in this run
seed int of schedules and draws
""")
IDENTITY = tuple(column.name for column in _IDENTITY)


def table(name: str, what: str, key: str, text: str) -> Table:
  """A table from lines of "name kind what"; see `schema.columns`."""
  return Table(name, what, tuple(key.split()), (*_IDENTITY, *columns(text)))
