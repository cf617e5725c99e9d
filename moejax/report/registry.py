"""Predictions, registered and hashed before the run, and settled by the tables that it writes.

A prediction is data: `table` and `select` name a row, `columns` what is measured in it, and `rule`
with its `bounds` says what is expected. A bound is a number or another column of the same row.

    rule            columns           bounds            met if
    greater         value             a                 value > a
    less            value             a                 value < a
    between         value             a, b              a <= value <= b
    excludes_zero   low, high         none              low > 0 or high < 0
    covers          low, high         a                 low <= a <= high
    overlaps        low, high         a, b              low <= b and high >= a
    within_band     value, low, high  a, centre, b      a <= value <= b and low <= centre <= high
    small_beside    value, x, y       share             |value| < share |x| and |value| < share |y|
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

from moejax.report.record import claim, write_json
from moejax.report.schema import Row, Table

REGISTRY = "predictions.json"

MET, MISSED, NOT_INTERPRETABLE = "MET", "MISSED", "NOT INTERPRETABLE"


class _Rule(NamedTuple):
  """A rule: how many columns and bounds it takes, and what it does with both, in this order.

  Attributes:
    columns, bounds: their numbers.
    expected: a format of their names and values.
    holds: of numbers, whether it is met.
  """

  columns: int
  bounds: int
  expected: str
  holds: Callable[..., bool]


_RULES = dict(
  greater=_Rule(1, 1, "{} > {}", lambda x, a: x > a),
  less=_Rule(1, 1, "{} < {}", lambda x, a: x < a),
  between=_Rule(1, 2, "{1} <= {0} <= {2}", lambda x, a, b: a <= x <= b),
  excludes_zero=_Rule(2, 0, "[{}, {}] excludes 0", lambda low, high: low > 0 or high < 0),
  covers=_Rule(2, 1, "[{}, {}] covers {}", lambda low, high, a: low <= a <= high),
  overlaps=_Rule(
    2, 2, "[{}, {}] overlaps [{}, {}]", lambda low, high, a, b: low <= b and high >= a
  ),
  within_band=_Rule(
    3,
    3,
    "{3} <= {0} <= {5} and [{1}, {2}] covers {4}",
    lambda x, low, high, a, centre, b: a <= x <= b and low <= centre <= high,
  ),
  small_beside=_Rule(
    3,
    1,
    "|{0}| < {3} of |{1}| and of |{2}|",
    lambda value, x, y, share: abs(value) < share * min(abs(x), abs(y)),
  ),
)


@dataclasses.dataclass(frozen=True)
class Prediction:
  """What a run is expected to show, and how that is settled.

  Attributes:
    id: short and unique, such as "P3".
    claim: what is expected, in words.
    mechanism: why it is expected.
    table: name of the table that settles it.
    select: column → value; finds at most one row.
    columns: of that row, in the order of the rule.
    rule: one of the table at the top of this module.
    bounds: numbers that ascend, or names of columns of the same row.
    paper: what the paper found.
  """

  id: str
  claim: str
  mechanism: str
  table: str
  select: dict[str, str | int | float | bool | None]
  columns: tuple[str, ...]
  rule: str
  bounds: tuple[float | str, ...]
  paper: str

  def __post_init__(self):
    for name in ("id", "claim", "mechanism", "table", "paper"):
      text = getattr(self, name)
      if not isinstance(text, str) or not text.strip() or len(text.splitlines()) > 1:
        raise ValueError(f"prediction {self.id!r}: {name} is {text!r}, expected one line of text.")
    if self.rule not in _RULES:
      raise ValueError(
        f"prediction {self.id}: the rule is {self.rule!r}, expected one of {', '.join(_RULES)}."
      )
    for name, count in (("columns", self._rule.columns), ("bounds", self._rule.bounds)):
      values = getattr(self, name)
      if not isinstance(values, tuple) or len(values) != count:
        raise ValueError(
          f"prediction {self.id}: {name} are {values!r}, {self.rule} takes a tuple of {count}."
        )
    numbers = [bound for bound in self.bounds if not isinstance(bound, str)]
    if not all(is_finite(x) for x in numbers) or numbers != sorted(numbers):
      raise ValueError(
        f"prediction {self.id}: bounds are {self.bounds!r}, expected finite numbers that ascend, "
        "or names of columns."
      )
    for name, value in self.select.items():
      if value is not None and not isinstance(value, str | bool) and not is_finite(value):
        raise ValueError(
          f"prediction {self.id}: select has {name} = {value!r}, expected text, a finite number, "
          "a boolean or None."
        )

  @property
  def _rule(self) -> _Rule:
    return _RULES[self.rule]

  @property
  def reads(self) -> tuple[str, ...]:
    """The columns that settle it: those measured and those that are bounds."""
    return (*self.columns, *(bound for bound in self.bounds if isinstance(bound, str)))

  @property
  def expected(self) -> str:
    """The rule with its columns and bounds, such as "rmf > 0.2"."""
    return self._rule.expected.format(*self.columns, *self.bounds)

  def holds(self, row: Row) -> bool:
    """Whether a row with numbers in all columns of `reads` meets the rule."""
    bounds = (row[bound] if isinstance(bound, str) else bound for bound in self.bounds)
    return bool(self._rule.holds(*(row[name] for name in self.columns), *bounds))


@dataclasses.dataclass(frozen=True)
class Verdict:
  """How a prediction came out.

  Attributes:
    id, claim, mechanism, expected, paper: of the prediction.
    sha256: of the prediction, as registered.
    status: `MET`, `MISSED` or `NOT_INTERPRETABLE`.
    measured: the numbers that settle it, or what is the matter with them.
  """

  id: str
  claim: str
  mechanism: str
  sha256: str
  status: str
  measured: str
  expected: str
  paper: str


def is_finite(value: Any) -> bool:
  """Whether a value is a finite int or float; a boolean is no number."""
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def canonical_sha256(value: Any) -> str:
  """Of a value as JSON with sorted keys and no spaces, in hexadecimal."""
  text = json.dumps(
    value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
  )
  return hashlib.sha256(text.encode()).hexdigest()


def sealed(content: dict[str, Any]) -> dict[str, Any]:
  """A record with its own hash, under "sha256"."""
  return {"sha256": canonical_sha256(content), **content}


def unsealed(what: str, entry: Any) -> dict[str, Any]:
  """The record in what `sealed` made.

  Raises:
    ValueError: names `what`; the record does not have the hash it carries.
  """
  if isinstance(entry, dict):
    content = {name: value for name, value in entry.items() if name != "sha256"}
    if entry.get("sha256") == canonical_sha256(content):
      return content
  raise ValueError(f"{what} was edited after it was hashed.")


def read_object(path: str | os.PathLike) -> dict[str, Any]:
  """A JSON object.

  Raises:
    ValueError: the file holds something else.
  """
  try:
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except ValueError:
    content = None
  if not isinstance(content, dict):
    raise ValueError(f"{path}: expected a JSON object.")
  return content


def digest(predictions: Sequence[Prediction]) -> str:
  """One hash of all predictions, whatever their order.

  Raises:
    ValueError: two of them have the same id.
  """
  by_id = {prediction.id: dataclasses.asdict(prediction) for prediction in predictions}
  if len(by_id) < len(predictions):
    ids = [prediction.id for prediction in predictions]
    raise ValueError(f"two predictions have the id {next(i for i in ids if ids.count(i) > 1)}.")
  return canonical_sha256(by_id)


def check(predictions: Sequence[Prediction], tables: Mapping[str, Table]) -> None:
  """Refuses predictions that no row could settle; once registered, a slip can't be mended.

  Args:
    predictions: before they are registered.
    tables: the tables of the study, by name.

  Raises:
    ValueError: an unknown table or column, a value to select that the column can't hold, a column
      to measure that holds no numbers.
  """
  for prediction in predictions:
    what = f"prediction {prediction.id}"
    if prediction.table not in tables:
      raise ValueError(f"{what}: there is no table {prediction.table}.")
    columns = {column.name: column for column in tables[prediction.table].columns}
    for name in (*prediction.select, *prediction.reads):
      if name not in columns:
        raise ValueError(f"{what}: table {prediction.table} has no column {name}.")
    for name, value in prediction.select.items():
      try:
        columns[name].format(value)
      except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    for name in prediction.reads:
      if columns[name].kind not in ("int", "float"):
        raise ValueError(f"{what}: {name} is {columns[name].kind}, expected int or float.")


def register(
  folder: str | os.PathLike, predictions: Sequence[Prediction], record: dict[str, Any]
) -> str:
  """Writes the predictions of a study down, before it runs, or compares with those there.

  Args:
    folder: of the study.
    predictions: each is written with its hash, and all with one more.
    record: of the run, see `run_record`; its environment may change, its other parts may not.

  Returns:
    The hash of all predictions.

  Raises:
    ValueError: the registry was edited after it was hashed, holds other predictions or another run,
      or a table that settles one of them is there before the registry.
  """
  path = pathlib.Path(folder) / REGISTRY
  total = digest(predictions)
  entries = [sealed(dataclasses.asdict(prediction)) for prediction in predictions]
  if path.is_file():
    found = [sealed(dataclasses.asdict(prediction)) for prediction in load(folder)]
    pairs = {(entry["id"], entry["sha256"]) for entry in entries}
    other = pairs ^ {(entry["id"], entry["sha256"]) for entry in found}
    if other:
      raise ValueError(f"{path}: prediction {min(other)[0]} is not as it was registered.")
    claim(path, record)
    return total
  for prediction in predictions:
    if (path.parent / f"{prediction.table}.tsv").exists():
      raise ValueError(
        f"{path}: predictions are registered before the run, but {prediction.table}.tsv is there."
      )
  write_json(path, dict(sha256=total, predictions=entries, **record))
  return total


def load(folder: str | os.PathLike) -> list[Prediction]:
  """The predictions registered in a folder.

  Raises:
    FileNotFoundError: none were.
    ValueError: the registry was edited after it was hashed.
  """
  path = pathlib.Path(folder) / REGISTRY
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no predictions were registered.")
  content = read_object(path)
  entries = content.get("predictions")
  if not isinstance(entries, list):
    raise ValueError(f"{path}: expected a list of predictions.")
  predictions = []
  for number, entry in enumerate(entries, start=1):
    parts = unsealed(f"{path}: prediction {number}", entry)
    try:
      lists = {name: tuple(parts[name]) for name in ("columns", "bounds")}
      predictions.append(Prediction(**(parts | lists)))
    except (KeyError, TypeError):
      raise ValueError(f"{path}: prediction {number} has other parts than a prediction.") from None
  if digest(predictions) != content.get("sha256"):
    raise ValueError(f"{path}: the registry was edited after it was hashed.")
  return predictions


def find_row(
  what: str,
  table: str,
  select: Mapping[str, Any],
  columns: Sequence[str],
  rows_by_table: Mapping[str, Sequence[Row]],
) -> Row | None:
  """The one row of a table that has the selected values, or None where there is no such row.

  Args:
    what: is named by errors.
    table, select: find the row.
    columns: that the row must have.
    rows_by_table: name → rows, as `Table.read` returns them.

  Raises:
    ValueError: a column is missing, or several rows have the values.
  """
  rows = rows_by_table.get(table, ())
  for row in rows:
    for name in (*select, *columns):
      if name not in row:
        raise ValueError(f"{what}: table {table} has no column {name}.")
  found = [row for row in rows if all(row[name] == value for name, value in select.items())]
  if len(found) > 1:
    raise ValueError(f"{what}: {len(found)} rows of {table} have {dict(select)}, expected one.")
  return found[0] if found else None


def is_interpretable(row: Row, columns: Sequence[str]) -> bool:
  """Whether a row has numbers in `columns`; a ratio that is none has no value there."""
  return all(row[name] is not None and not math.isnan(row[name]) for name in columns)


def evaluate(
  predictions: Sequence[Prediction], rows_by_table: Mapping[str, Sequence[Row]]
) -> list[Verdict]:
  """Settles predictions, those of `load` or the endpoints of a held-out protocol, in their order.

  Where the row is missing or lacks a number, the verdict is that it is not interpretable.

  Raises:
    ValueError: a column is missing, or several rows match one prediction.
  """
  return [_verdict(prediction, rows_by_table) for prediction in predictions]


def _verdict(prediction: Prediction, rows_by_table: Mapping[str, Sequence[Row]]) -> Verdict:
  row = find_row(
    f"prediction {prediction.id}",
    prediction.table,
    prediction.select,
    prediction.reads,
    rows_by_table,
  )
  if row is None:
    status, measured = NOT_INTERPRETABLE, f"no such row in {prediction.table}"
  else:
    measured = ", ".join(f"{name} {_text(row[name])}" for name in prediction.reads)
    if not is_interpretable(row, prediction.reads):
      status = NOT_INTERPRETABLE
    else:
      status = MET if prediction.holds(row) else MISSED
  return Verdict(
    id=prediction.id,
    claim=prediction.claim,
    mechanism=prediction.mechanism,
    sha256=canonical_sha256(dataclasses.asdict(prediction)),
    status=status,
    measured=measured,
    expected=prediction.expected,
    paper=prediction.paper,
  )


def _text(value: float | None) -> str:
  return "none" if value is None else f"{value:.6g}"


def describe(verdict: Verdict) -> str:
  """One line, laid out alike for hits and misses."""
  return (
    f"{verdict.status:<{len(NOT_INTERPRETABLE)}} | {verdict.id} | {verdict.claim} "
    f"| measured: {verdict.measured} | expected: {verdict.expected} | paper: {verdict.paper}"
  )
