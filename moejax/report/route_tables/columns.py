"""How a table of the route study is written down: what its rows share, one line a column."""

from collections.abc import Sequence

from moejax.report.schema import columns, Table

_IDENTITY = columns("""
protocol str script that made the row
model str name of the checkpoint
weights_sha256 str of the weight files
tokenizer_sha256 str of tokenizer.json
contract str native contract of the model in this run
seed int of draws and resamples
data text where the text is from
data_sha256 str of the documents of the split
split str calibration or held_out
disturbance str what is done to the computation
sequences int sequences, the clusters of intervals
tokens int scored tokens
interval str how intervals are made
""")
IDENTITY = tuple(column.name for column in _IDENTITY)


def table(name: str, what: str, key: str, text: str) -> Table:
  """A table from lines of "name kind what"; see `schema.columns`.

  "*name what" is an estimate: name, name_low and name_high, each a float or none.
  """
  lines = []
  for line in text.strip().split("\n"):
    lines += _estimate(line) if line.startswith("*") else [line]
  return Table(name, what, tuple(key.split()), (*_IDENTITY, *columns("\n".join(lines))))


def _estimate(line: str) -> Sequence[str]:
  name, what = line[1:].split(maxsplit=1)
  bounds = (f"{name}_{end} float? its interval" for end in ("low", "high"))
  return [f"{name} float? {what}", *bounds]
