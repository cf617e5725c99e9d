"""Predictions: every rule both ways, a registry that can't be edited, misses as loud as hits."""

import dataclasses
import json

import pytest

from moejax.report import registry
from moejax.report.registry import Prediction
from moejax.report.schema import Column, Table

RECORD = dict(model="olmoe", weights_sha256="ab", environment=dict(cpu="one"))
TABLE = Table(
  "rmf",
  "Route-mediated fractions.",
  ("bits", "split"),
  (
    Column("bits", "int", "of the cache"),
    Column("split", "str", "of the data"),
    Column("rmf", "float", "of the damage", optional=True),
    Column("rmf_low", "float", "of its interval", optional=True),
    Column("rmf_high", "float", "of its interval", optional=True),
    Column("harm", "float", "nats"),
    Column("benefit", "float", "nats"),
  ),
)


def prediction(**more):
  return Prediction(
    **dict(
      id="P1",
      claim="A part is routed",
      mechanism="top-k is discontinuous",
      table="rmf",
      select=dict(bits=4, split="calibration"),
      columns=("rmf",),
      rule="greater",
      bounds=(0.2,),
      paper="0.31 [0.20, 0.41]",
    )
    | more
  )


def row(**more):
  values = dict(bits=4, split="calibration", rmf=0.31, rmf_low=0.2, rmf_high=0.41)
  return values | dict(harm=0.042, benefit=-0.049) | more


def settle(row_values, **more):
  (verdict,) = registry.evaluate([prediction(**more)], dict(rmf=[row(**row_values)]))
  return verdict


VALUE = ("rmf",)
INTERVAL = ("rmf_low", "rmf_high")
ESTIMATE = VALUE + INTERVAL
RULES = [  # rule, columns, bounds, what a row that meets it has, what one that misses it has
  ("greater", VALUE, (0.3,), dict(rmf=0.31), dict(rmf=0.3)),
  ("less", VALUE, (0.3,), dict(rmf=0.29), dict(rmf=0.3)),
  ("between", VALUE, (0.2, 0.4), dict(rmf=0.2), dict(rmf=0.19)),
  ("between", VALUE, (0.2, 0.4), dict(rmf=0.4), dict(rmf=0.41)),
  ("excludes_zero", INTERVAL, (), dict(rmf_low=0.01), dict(rmf_low=0.0)),
  ("excludes_zero", INTERVAL, (), dict(rmf_low=-1, rmf_high=-0.1), dict(rmf_low=-1, rmf_high=0)),
  ("covers", INTERVAL, (0.2,), dict(rmf_low=0.2), dict(rmf_low=0.21)),
  ("covers", INTERVAL, (0.41,), dict(rmf_high=0.41), dict(rmf_high=0.4)),
  ("overlaps", INTERVAL, (0.41, 0.6), dict(rmf_high=0.41), dict(rmf_high=0.4)),
  ("overlaps", INTERVAL, (0.1, 0.2), dict(rmf_low=0.2), dict(rmf_low=0.21)),
  ("within_band", ESTIMATE, (0.2, 0.25, 0.3), dict(rmf=0.3), dict(rmf=0.31)),
  ("within_band", ESTIMATE, (0.2, 0.25, 0.3), dict(rmf=0.2), dict(rmf=0.19)),
  ("within_band", ESTIMATE, (0.2, 0.25, 0.4), dict(rmf_low=0.25), dict(rmf_low=0.26)),
  ("within_band", ESTIMATE, (0.2, 0.25, 0.4), dict(rmf_high=0.25), dict(rmf_high=0.24)),
  ("small_beside", ("rmf", "harm", "benefit"), (0.2,), dict(rmf=-0.0083), dict(rmf=-0.0085)),
  ("small_beside", ("rmf", "benefit", "harm"), (0.2,), dict(rmf=0.0083), dict(rmf=0.0085)),
]


@pytest.mark.parametrize("rule,columns,bounds,met,missed", RULES)
def test_each_rule_is_met_and_missed(rule, columns, bounds, met, missed):
  how = dict(rule=rule, columns=columns, bounds=bounds)
  assert settle(met, **how).status == "MET"
  assert settle(missed, **how).status == "MISSED"


def test_no_rule_is_untested():
  with pytest.raises(ValueError, match="expected one of") as error:
    prediction(rule="most")
  known = str(error.value).split("expected one of ")[1].rstrip(".").split(", ")
  assert sorted({case[0] for case in RULES}) == sorted(known)


def test_what_is_expected_is_said_by_name_and_number():
  expected = {
    case[0]: prediction(**dict(zip(("rule", "columns", "bounds"), case))).expected for case in RULES
  }
  assert expected == dict(
    greater="rmf > 0.3",
    less="rmf < 0.3",
    between="0.2 <= rmf <= 0.4",
    excludes_zero="[rmf_low, rmf_high] excludes 0",
    covers="[rmf_low, rmf_high] covers 0.41",
    overlaps="[rmf_low, rmf_high] overlaps [0.1, 0.2]",
    within_band="0.2 <= rmf <= 0.4 and [rmf_low, rmf_high] covers 0.25",
    small_beside="|rmf| < 0.2 of |benefit| and of |harm|",
  )


def test_a_bound_may_be_a_column_and_is_shown():
  how = dict(rule="between", bounds=("rmf_low", 0.3))
  verdict = settle(dict(rmf=0.31), **how)
  assert (verdict.status, verdict.expected) == ("MISSED", "rmf_low <= rmf <= 0.3")
  assert verdict.measured == "rmf 0.31, rmf_low 0.2"
  assert settle(dict(rmf=0.3), **how).status == "MET"
  assert settle(dict(rmf=0.3, rmf_low=0.301), **how).status == "MISSED"


@pytest.mark.parametrize(
  "values,measured",
  [
    (dict(rmf=None), "rmf none"),
    (dict(rmf=float("nan")), "rmf nan"),
    (dict(split="held_out"), "no such row in rmf"),
  ],
)
def test_what_cannot_be_read_is_not_interpretable(values, measured):
  verdict = settle(values)
  assert (verdict.status, verdict.measured) == ("NOT INTERPRETABLE", measured)
  assert settle({}).status == "MET"


def test_a_number_that_the_rule_does_not_read_may_be_missing():
  assert settle(dict(rmf_low=None)).status == "MET"


def test_a_table_that_was_not_made_is_not_interpretable():
  (verdict,) = registry.evaluate([prediction()], {})
  assert (verdict.status, verdict.measured) == ("NOT INTERPRETABLE", "no such row in rmf")


def test_rows_that_no_verdict_can_come_of_are_refused():
  with pytest.raises(ValueError, match=r"prediction P1: 2 rows of rmf have \{'bits': 4"):
    registry.evaluate([prediction()], dict(rmf=[row(), row(rmf=0.1)]))
  with pytest.raises(ValueError, match="prediction P1: table rmf has no column width"):
    settle({}, columns=("width",))
  with pytest.raises(ValueError, match="prediction P1: table rmf has no column bit"):
    settle({}, select=dict(bit=4))


def test_verdicts_are_of_rows_as_they_are_read(tmp_path):
  TABLE.write(tmp_path, [row(), row(bits=2, rmf=0.09)])
  predictions = [prediction(), prediction(id="P2", select=dict(bits=2))]
  verdicts = registry.evaluate(predictions, dict(rmf=TABLE.read(tmp_path)))
  assert [(v.id, v.status) for v in verdicts] == [("P1", "MET"), ("P2", "MISSED")]


def test_hits_and_misses_are_laid_out_alike():
  hit, miss, none = (registry.describe(settle(dict(rmf=x))) for x in (0.31, 0.1, None))
  rest = "expected: rmf > 0.2 | paper: 0.31 [0.20, 0.41]"
  assert hit == f"MET               | P1 | A part is routed | measured: rmf 0.31 | {rest}"
  assert miss == f"MISSED            | P1 | A part is routed | measured: rmf 0.1 | {rest}"
  assert none == f"NOT INTERPRETABLE | P1 | A part is routed | measured: rmf none | {rest}"


@pytest.mark.parametrize(
  "more,message",
  [
    (dict(rule="most"), "prediction P1: the rule is 'most', expected one of greater, less"),
    (dict(columns=("rmf", "harm")), r"columns are \('rmf', 'harm'\), greater takes a tuple of 1"),
    (dict(columns="r"), "columns are 'r', greater takes a tuple of 1"),
    (dict(bounds=()), r"bounds are \(\), greater takes a tuple of 1"),
    (dict(bounds=(float("nan"),)), "expected finite numbers that ascend"),
    (dict(bounds=(True,)), "expected finite numbers that ascend"),
    (dict(rule="between", bounds=(2, 1)), "expected finite numbers that ascend"),
    (dict(claim="one\ntwo"), r"claim is 'one\\ntwo', expected one line of text"),
    (dict(mechanism=" "), "mechanism is ' ', expected one line of text"),
    (dict(id=3), "prediction 3: id is 3, expected one line of text"),
    (dict(select=dict(bits=[4])), r"select has bits = \[4\], expected text, a finite number"),
  ],
)
def test_a_prediction_that_says_nothing_is_refused(more, message):
  with pytest.raises(ValueError, match=message):
    prediction(**more)


@pytest.mark.parametrize(
  "more,message",
  [
    (dict(table="rfm"), "prediction P1: there is no table rfm"),
    (dict(columns=("fraction",)), "prediction P1: table rmf has no column fraction"),
    (dict(bounds=("fraction",)), "prediction P1: table rmf has no column fraction"),
    (dict(select=dict(bit=4)), "prediction P1: table rmf has no column bit"),
    (dict(select=dict(bits="4")), "prediction P1: bits: '4' is no int"),
    (dict(columns=("split",)), "prediction P1: split is str, expected int or float"),
  ],
)
def test_a_slip_is_found_before_it_is_registered(more, message):
  registry.check([prediction()], dict(rmf=TABLE))
  with pytest.raises(ValueError, match=message):
    registry.check([prediction(**more)], dict(rmf=TABLE))


def test_what_was_registered_comes_back(tmp_path):
  mine = [prediction(), prediction(id="P2", rule="between", bounds=(0, "rmf_high"))]
  total = registry.register(tmp_path, mine, RECORD)
  assert registry.load(tmp_path) == mine
  assert total == registry.digest(mine) == registry.digest(mine[::-1])
  content = json.loads((tmp_path / "predictions.json").read_text())
  assert content["sha256"] == total and content["model"] == "olmoe"
  verdicts = registry.evaluate(mine, {})
  assert [v.sha256 for v in verdicts] == [entry["sha256"] for entry in content["predictions"]]


def test_registering_again_compares_and_writes_nothing(tmp_path):
  registry.register(tmp_path, [prediction()], RECORD)
  before = (tmp_path / "predictions.json").read_bytes()
  (tmp_path / "rmf.tsv").touch()
  elsewhere = RECORD | dict(environment=dict(cpu="another"))
  assert registry.register(tmp_path, [prediction()], elsewhere) == registry.digest([prediction()])
  assert (tmp_path / "predictions.json").read_bytes() == before
  with pytest.raises(ValueError, match="holds a run with another model: it is 'olmoe'"):
    registry.register(tmp_path, [prediction()], RECORD | dict(model="qwen"))


@pytest.mark.parametrize(
  "mine,id",
  [
    ([prediction(bounds=(0.1,))], "P1"),
    ([prediction(), prediction(id="P2")], "P2"),
    ([prediction(id="P3")], "P1"),
  ],
)
def test_other_predictions_than_the_registered_are_refused(tmp_path, mine, id):
  registry.register(tmp_path, [prediction()], RECORD)
  with pytest.raises(ValueError, match=rf"predictions\.json: prediction {id} is not as it was reg"):
    registry.register(tmp_path, mine, RECORD)


def _rehash_entry(content):
  content["predictions"][0]["bounds"] = [0.1]
  entry = content["predictions"][0]
  content["predictions"][0] = registry.sealed({k: v for k, v in entry.items() if k != "sha256"})


@pytest.mark.parametrize(
  "edit,message",
  [
    (lambda c: c["predictions"][0].update(bounds=[0.1]), "prediction 1 was edited after it was"),
    (lambda c: c["predictions"][1].update(paper="0.2"), "prediction 2 was edited after it was"),
    (lambda c: c["predictions"].pop(), "the registry was edited after it was hashed"),
    (lambda c: c.update(sha256="0" * 64), "the registry was edited after it was hashed"),
    (lambda c: c.update(predictions={}), "expected a list of predictions"),
    (_rehash_entry, "the registry was edited after it was hashed"),
  ],
)
def test_an_edited_registry_is_refused(tmp_path, edit, message):
  mine = [prediction(), prediction(id="P2")]
  registry.register(tmp_path, mine, RECORD)
  path = tmp_path / "predictions.json"
  content = json.loads(path.read_text())
  edit(content)
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=rf"predictions\.json: {message}"):
    registry.load(tmp_path)
  with pytest.raises(ValueError, match=rf"predictions\.json: {message}"):
    registry.register(tmp_path, mine, RECORD)


def test_entries_of_another_version_and_other_files_are_refused(tmp_path):
  path = tmp_path / "predictions.json"
  parts = {k: v for k, v in dataclasses.asdict(prediction()).items() if k != "paper"}
  path.write_text(json.dumps(dict(sha256="", predictions=[registry.sealed(parts)])))
  with pytest.raises(ValueError, match="prediction 1 has other parts than a prediction"):
    registry.load(tmp_path)
  path.write_text("[")
  with pytest.raises(ValueError, match=r"predictions\.json: expected a JSON object"):
    registry.load(tmp_path)
  path.unlink()
  with pytest.raises(FileNotFoundError, match=r"predictions\.json: no predictions were registered"):
    registry.load(tmp_path)


def test_predictions_after_the_run_are_refused(tmp_path):
  (tmp_path / "rmf.tsv").touch()
  with pytest.raises(ValueError, match=r"registered before the run, but rmf\.tsv is there"):
    registry.register(tmp_path, [prediction()], RECORD)
  assert not (tmp_path / "predictions.json").exists()
  registry.register(tmp_path, [prediction(table="other")], RECORD)


def test_ids_differ():
  with pytest.raises(ValueError, match="two predictions have the id P1"):
    registry.digest([prediction(), prediction(id="P2"), prediction(bounds=(0.3,))])


def test_the_digest_depends_on_every_part():
  changes = dict(
    id="P2",
    claim="x",
    mechanism="x",
    table="x",
    select={},
    columns=("x",),
    rule="less",
    bounds=(0.3,),
    paper="x",
  )
  assert set(changes) == {field.name for field in dataclasses.fields(Prediction)}
  digests = {registry.digest([prediction(**{name: x})]) for name, x in changes.items()}
  assert len(digests | {registry.digest([prediction()])}) == len(changes) + 1
