"""The evidence matrix and the ledger of negative results, made from table rows and verdicts.

Nothing in them is typed: a claim names its grade and where its numbers stand, the numbers are read
from there, and what came out against a prediction or could not be told from zero is listed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from moejax.report.registry import find_row, is_interpretable, MET, NOT_INTERPRETABLE, Verdict
from moejax.report.schema import Row

GRADES = ("empirical", "pilot", "bound")
INCLUDES_ZERO = "INCLUDES ZERO"

_SAMPLE = ("split", "sequences", "tokens")


@dataclasses.dataclass(frozen=True)
class Claim:
  """A statement and the row that it rests on.

  Attributes:
    id: short and unique.
    grade: one of `GRADES`.
    statement: in words.
    table: name of the table.
    select: column → value; finds at most one row.
    columns: of the value, and of both ends of its interval where there is one.
  """

  id: str
  grade: str
  statement: str
  table: str
  select: dict[str, Any]
  columns: tuple[str, ...]

  def __post_init__(self):
    _check_grade(f"claim {self.id}", self.grade)
    if not isinstance(self.columns, tuple) or len(self.columns) not in (1, 3):
      raise ValueError(
        f"claim {self.id}: columns are {self.columns!r}, expected a tuple of a value, or of a "
        "value and both ends of its interval."
      )


def evidence_rows(claims: Sequence[Claim], rows_by_table: Mapping[str, Sequence[Row]]) -> list[Row]:
  """The evidence matrix: one row per claim, in their order.

  Args:
    claims: with different ids.
    rows_by_table: name → rows, as `Table.read` returns them. Those that claims rest on have the
      columns split, sequences and tokens.

  Returns:
    Rows of claim, grade, statement, table, split, sequences, tokens, value, low, high and
    interpretable. A claim without a row is there too: not interpretable, its numbers None.

  Raises:
    ValueError: two claims with one id, a column is missing, or several rows match one claim.
  """
  ids = [claim.id for claim in claims]
  for id in ids:
    if ids.count(id) > 1:
      raise ValueError(f"two claims have the id {id}.")
  return [_evidence_row(claim, rows_by_table) for claim in claims]


def _evidence_row(claim: Claim, rows_by_table: Mapping[str, Sequence[Row]]) -> Row:
  columns = (*_SAMPLE, *claim.columns)
  row = find_row(f"claim {claim.id}", claim.table, claim.select, columns, rows_by_table)
  numbers = [None if row is None else row[name] for name in claim.columns]
  value, low, high = numbers if len(numbers) == 3 else (*numbers, None, None)
  return dict(
    claim=claim.id,
    grade=claim.grade,
    statement=claim.statement,
    table=claim.table,
    **{name: None if row is None else row[name] for name in _SAMPLE},
    value=value,
    low=low,
    high=high,
    interpretable=row is not None and is_interpretable(row, claim.columns),
  )


def ledger_rows(verdicts: Sequence[Verdict], evidence: Sequence[Row]) -> list[Row]:
  """The ledger: what was missed, could not be interpreted, or has an interval that includes zero.

  Args:
    verdicts: of `registry.evaluate`.
    evidence: of `evidence_rows`.

  Returns:
    Rows of source ("prediction" or "claim"), id, status, statement, measured and expected.

  Raises:
    ValueError: a row of the evidence has no grade, or an unknown one.
  """
  rows = [
    dict(
      source="prediction",
      id=verdict.id,
      status=verdict.status,
      statement=verdict.claim,
      measured=verdict.measured,
      expected=verdict.expected,
    )
    for verdict in verdicts
    if verdict.status != MET
  ]
  for row in evidence:
    _check_grade(f"evidence row {row.get('claim')}", row.get("grade"))
    status = _shortfall(row)
    if status:
      rows.append(
        dict(
          source="claim",
          id=row["claim"],
          status=status,
          statement=row["statement"],
          measured=_measured(row),
          expected="interpretable, with no interval that includes 0",
        )
      )
  return rows


def _check_grade(what: str, grade: Any) -> None:
  if grade not in GRADES:
    raise ValueError(f"{what}: the grade is {grade!r}, expected one of {', '.join(GRADES)}.")


def _shortfall(row: Row) -> str | None:
  if not row["interpretable"]:
    return NOT_INTERPRETABLE
  if row["low"] is not None and row["low"] <= 0 <= row["high"]:
    return INCLUDES_ZERO
  return None


def _measured(row: Row) -> str:
  value, low, high = (
    "none" if row[name] is None else f"{row[name]:.6g}" for name in ("value", "low", "high")
  )
  return value if row["low"] is None else f"{value} [{low}, {high}]"
