"""The held-out split: one read, whatever happens in it, and a mark for every other."""

import dataclasses
import datetime
import json

import pytest

from moejax.report import held_out, registry
from moejax.report.held_out import open_once, Protocol
from moejax.report.registry import Prediction

DATA = "d" * 64


def endpoint(**more):
  return Prediction(
    **dict(
      id="H3",
      claim="Oracle-gated recovery is excluded",
      mechanism="harm can't be told",
      table="policies",
      select=dict(policy="oracle"),
      columns=("recovery_high",),
      rule="less",
      bounds=(0.008,),
      paper="missed by 0.0002",
    )
    | more
  )


def protocol(**more):
  values = dict(endpoints=(endpoint(),), model="olmoe", weights_sha256="a" * 64, data_sha256=DATA)
  return Protocol(**values | dict(discovery=dict(rmf_low=0.2, rmf_high=0.41)) | more)


PLAN = protocol()
OTHER = protocol(endpoints=(endpoint(bounds=(0.01,)),))


def never():
  raise AssertionError("the split was read")


def read(folder, force=False, protocol=PLAN):
  return open_once(folder, protocol, protocol.data_sha256, lambda: "data", force)


def refused(folder, message, force=False, protocol=PLAN, data=DATA):
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  with pytest.raises(ValueError, match=message):
    open_once(folder, protocol, data, never, force)
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def recorded(folder):
  return json.loads((folder / "held_out_reads.json").read_text())


@pytest.mark.parametrize("force", [False, True])
def test_a_first_read_is_recorded_and_not_marked(tmp_path, force):
  data, reading = read(tmp_path, force)
  assert data == "data"
  assert (reading.number, reading.forced, reading.forced_reads) == (1, False, 0)
  assert reading.protocol_sha256 == PLAN.sha256 and reading.data_sha256 == DATA
  assert datetime.datetime.fromisoformat(reading.date).utcoffset() == datetime.timedelta(0)
  content = recorded(tmp_path)
  assert content["forced_reads"] == 0
  assert [held_out.Reading(**entry) for entry in content["reads"]] == [reading]


def test_both_files_are_there_before_the_data(tmp_path):
  def look():
    (entry,) = json.loads((tmp_path / "held_out_protocol.json").read_text())["protocols"]
    assert entry["endpoints"][0]["bounds"] == [0.008] and entry["discovery"]["rmf_high"] == 0.41
    assert entry["sha256"] == PLAN.sha256 == recorded(tmp_path)["reads"][0]["protocol_sha256"]
    return "looked"

  assert open_once(tmp_path, PLAN, DATA, look)[0] == "looked"


def test_a_second_read_is_refused(tmp_path):
  date = read(tmp_path)[1].date
  refused(tmp_path, rf"held_out_reads\.json: the held-out split was read on {date[:10]}.*read once")
  assert len(recorded(tmp_path)["reads"]) == 1


def test_a_forced_read_is_marked_for_good(tmp_path):
  read(tmp_path)
  marks = [read(tmp_path, force=True)[1] for _ in range(3)]
  assert [(m.number, m.forced, m.forced_reads) for m in marks] == [
    (2, True, 1),
    (3, True, 2),
    (4, True, 3),
  ]
  content = recorded(tmp_path)
  assert content["forced_reads"] == 3
  assert [entry["forced"] for entry in content["reads"]] == [False, True, True, True]
  refused(tmp_path, "read once")


def test_a_read_that_fails_counts(tmp_path):
  def fail():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    open_once(tmp_path, PLAN, DATA, fail)
  assert len(recorded(tmp_path)["reads"]) == 1
  refused(tmp_path, "read once")
  assert read(tmp_path, force=True)[1].forced_reads == 1


@pytest.mark.parametrize("name", [held_out.PROTOCOL, held_out.READS])
def test_nothing_is_read_that_could_not_be_recorded(tmp_path, monkeypatch, name):
  write = held_out.write_json

  def full(path, content):
    if path.name == name:
      raise OSError("disk full")
    write(path, content)

  monkeypatch.setattr(held_out, "write_json", full)
  with pytest.raises(OSError, match="disk full"):
    open_once(tmp_path, PLAN, DATA, never)
  monkeypatch.undo()
  assert read(tmp_path)[1].forced_reads == 0


def test_another_protocol_needs_force_and_both_are_kept(tmp_path):
  read(tmp_path)
  refused(tmp_path, r"held_out_protocol\.json: holds another protocol", protocol=OTHER)
  _, reading = read(tmp_path, force=True, protocol=OTHER)
  assert (reading.forced_reads, reading.protocol_sha256) == (1, OTHER.sha256)
  entries = json.loads((tmp_path / held_out.PROTOCOL).read_text())["protocols"]
  assert [entry["sha256"] for entry in entries] == [PLAN.sha256, OTHER.sha256]
  refused(tmp_path, "holds another protocol")
  refused(tmp_path, "read once", protocol=OTHER)


def test_a_protocol_replaced_before_the_first_read_marks_it(tmp_path, monkeypatch):
  write = held_out.write_json
  monkeypatch.setattr(held_out, "write_json", lambda p, c: p.name == held_out.READS or write(p, c))
  read(tmp_path)
  read(tmp_path, force=True, protocol=OTHER)
  assert not (tmp_path / held_out.READS).exists()
  monkeypatch.undo()
  refused(tmp_path, "holds another protocol")
  reading = read(tmp_path, protocol=OTHER)[1]
  assert (reading.number, reading.forced, reading.forced_reads) == (1, True, 1)


def _edit(path, change):
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def _loosen(content):
  content["protocols"][0]["endpoints"][0]["bounds"] = [0.01]


def _loosen_and_hash_anew(content):
  content["protocols"] = [registry.sealed(dataclasses.asdict(OTHER))]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
  "change,message",
  [
    (_loosen, "the protocol was edited after it was hashed"),
    (_loosen_and_hash_anew, "the protocol of read 1 is no longer there"),
    (lambda content: content.clear(), "expected a list of protocols"),
    (lambda content: content["protocols"].clear(), "expected a list of protocols"),
  ],
)
def test_an_edited_protocol_is_refused_forced_or_not(tmp_path, change, message, force):
  read(tmp_path)
  _edit(tmp_path / held_out.PROTOCOL, change)
  for mine in (PLAN, OTHER):
    refused(tmp_path, rf"held_out_protocol\.json: {message}", force, mine)


@pytest.mark.parametrize("force", [False, True])
def test_a_protocol_that_was_taken_away_is_refused(tmp_path, force):
  read(tmp_path)
  (tmp_path / held_out.PROTOCOL).unlink()
  refused(tmp_path, "the protocol of read 1 is no longer there", force)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
  "change",
  [
    lambda content: content.update(forced_reads=0),
    lambda content: content["reads"].pop(),
    lambda content: content["reads"][1].update(forced=False),
  ],
)
def test_marks_that_were_edited_are_refused(tmp_path, change, force):
  read(tmp_path)
  read(tmp_path, force=True)
  _edit(tmp_path / held_out.READS, change)
  refused(tmp_path, r"held_out_reads\.json was edited after it was hashed", force)


@pytest.mark.parametrize("force", [False, True])
def test_other_data_than_the_protocol_names_are_refused(tmp_path, force):
  refused(tmp_path, f"has sha256 {'e' * 64}, the protocol names {DATA}", force, data="e" * 64)


@pytest.mark.parametrize(
  "more,message",
  [
    (dict(endpoints=()), "the protocol has no endpoints"),
    (dict(endpoints=(endpoint(), endpoint())), "two predictions have the id H3"),
    (dict(data_sha256="d"), "the protocol's data_sha256 is 'd', expected 64 hexadecimal digits"),
    (dict(weights_sha256="A" * 64), "the protocol's weights_sha256 is 'A"),
    (dict(discovery=dict(rmf="0.3")), "discovery has rmf = '0.3', expected a number"),
  ],
)
def test_a_protocol_that_settles_nothing_is_refused(more, message):
  with pytest.raises(ValueError, match=message):
    protocol(**more)


@pytest.mark.parametrize("high,status", [(0.0079, "MET"), (0.0082, "MISSED")])
def test_endpoints_are_settled_by_the_rows_of_the_read(high, status):
  rows = dict(policies=[dict(policy="oracle", recovery_high=high)])
  assert [v.status for v in registry.evaluate(PLAN.endpoints, rows)] == [status]
