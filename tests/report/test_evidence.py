"""The evidence matrix and the ledger say what the rows say, and leave nothing negative out."""

import pytest

from moejax.report import evidence, registry
from moejax.report.evidence import Claim, evidence_rows, ledger_rows

RMF = ("rmf", "rmf_low", "rmf_high")


def claim(**more):
  values = dict(id="C1", grade="pilot", statement="A part is routed", table="rmf")
  return Claim(**values | dict(select=dict(bits=4), columns=RMF) | more)


def row(**more):
  values = dict(bits=4, split="calibration", sequences=96, tokens=18432)
  return values | dict(rmf=0.31, rmf_low=0.2, rmf_high=0.41) | more


def matrix(*rows, **more):
  return evidence_rows([claim(**more)], dict(rmf=rows))


def prediction(id, bound):
  return registry.Prediction(
    id, "A part is routed", "top-k", "rmf", dict(bits=4), ("rmf",), "greater", (bound,), "0.31"
  )


def test_the_matrix_holds_the_numbers_of_the_row():
  assert matrix(row(bits=8), row()) == [
    dict(
      claim="C1",
      grade="pilot",
      statement="A part is routed",
      table="rmf",
      split="calibration",
      sequences=96,
      tokens=18432,
      value=0.31,
      low=0.2,
      high=0.41,
      interpretable=True,
    )
  ]


def test_a_claim_without_an_interval_has_none():
  (found,) = matrix(row(), columns=("rmf",))
  assert (found["value"], found["low"], found["high"]) == (0.31, None, None)
  assert found["interpretable"] and ledger_rows([], [found]) == []


@pytest.mark.parametrize(
  "values,measured",
  [
    (dict(rmf=None), "none [0.2, 0.41]"),
    (dict(rmf_low=None, rmf_high=None), "0.31"),
    (dict(rmf_high=float("nan")), "0.31 [0.2, nan]"),
    (dict(bits=8), "none"),
  ],
)
def test_a_claim_that_cannot_be_read_is_listed_in_both(values, measured):
  found = matrix(row(**values))
  assert [x["claim"] for x in found if not x["interpretable"]] == ["C1"]
  (listed,) = ledger_rows([], found)
  assert (listed["id"], listed["status"]) == ("C1", "NOT INTERPRETABLE")
  assert listed["measured"] == measured


@pytest.mark.parametrize(
  "low,high,listed",
  [
    (0.01, 0.4, False),
    (-0.4, -0.01, False),
    (-0.111, 0.394, True),
    (0.0, 0.4, True),
    (-0.4, 0.0, True),
  ],
)
def test_the_ledger_lists_intervals_that_include_zero(low, high, listed):
  rows = ledger_rows([], matrix(row(rmf_low=low, rmf_high=high)))
  assert [x["status"] for x in rows] == ["INCLUDES ZERO"] * listed


def test_the_ledger_lists_every_prediction_that_was_not_met():
  predictions = [prediction("P1", 0.3), prediction("P2", 0.4)]
  rows = dict(rmf=[row(rmf_low=-0.1)])
  verdicts = registry.evaluate(predictions, rows) + registry.evaluate([prediction("P3", 0)], {})
  ledger = ledger_rows(verdicts, evidence_rows([claim()], rows))
  assert [(x["source"], x["id"], x["status"]) for x in ledger] == [
    ("prediction", "P2", "MISSED"),
    ("prediction", "P3", "NOT INTERPRETABLE"),
    ("claim", "C1", "INCLUDES ZERO"),
  ]
  assert [(x["measured"], x["expected"]) for x in ledger[:2]] == [
    ("rmf 0.31", "rmf > 0.4"),
    ("no such row in rmf", "rmf > 0"),
  ]
  assert ledger[2]["measured"] == "0.31 [-0.1, 0.41]"
  assert {tuple(x) for x in ledger} == {tuple(ledger[0])}


@pytest.mark.parametrize("grade", ["proved", "", None])
def test_an_unknown_grade_is_refused(grade):
  with pytest.raises(
    ValueError, match=r"claim C1: the grade is .*expected one of empirical, pilot"
  ):
    claim(grade=grade)
  assert [claim(grade=known).grade for known in evidence.GRADES] == ["empirical", "pilot", "bound"]


def test_rows_without_a_grade_are_refused():
  (found,) = matrix(row())
  for odd in (found | dict(grade=None), {k: v for k, v in found.items() if k != "grade"}):
    with pytest.raises(ValueError, match="evidence row C1: the grade is None"):
      ledger_rows([], [odd])


@pytest.mark.parametrize("columns", [(), ("rmf", "rmf_low"), ["rmf"], "rmf"])
def test_columns_are_a_value_or_a_value_and_its_interval(columns):
  with pytest.raises(ValueError, match=r"claim C1: columns are .* expected a tuple of a value"):
    claim(columns=columns)


def test_claims_and_rows_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="two claims have the id C1"):
    evidence_rows([claim(), claim(grade="bound")], {})
  with pytest.raises(ValueError, match="claim C1: 2 rows of rmf have"):
    matrix(row(), row(rmf=0.2))
  for name in ("split", "sequences", "tokens", "rmf_low"):
    with pytest.raises(ValueError, match=f"claim C1: table rmf has no column {name}"):
      matrix({k: v for k, v in row().items() if k != name})
