"""The reduction study on tiny models: its rows, their audit, and going on after a kill.

The default tests run what the quickstart runs; the whole study of every family is `slow`.
"""

import copy
import csv
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types

import numpy as np
import pytest

from configs import prompts as prompt_sets
from experiments import quickstart
from experiments.reduction import (
  audit,
  branch_sweep,
  event_direction,
  kv_equivalence,
  mhc_equivalence,
  run_all,
  schedule_runs,
  substitution,
)
from experiments.reduction import (
  study as studies,
)
from experiments.reduction.single_run import run_alone
from experiments.route import study as route_studies
import moejax
from moejax.models import Mode
from moejax.report import reduction_tables as tables
from moejax.report import route_tables
from tests.experiments import tiny_model
from tests.oracles import assert_same_bits

ROOT = pathlib.Path(__file__).parents[2]
PROMPTS = (prompt_sets.DEPTH[0], prompt_sets.DEPTH[2])
LAYER = {"olmoe": 0, "deepseek": 1, "deepseek_v4": 2, "qwen2_moe": 0, "qwen3_moe": 0}
_FOLDER = tempfile.TemporaryDirectory()


def study(family: str, name: str, **more) -> studies.Study:
  options = dict(fork_layer=LAYER[family], prompts=PROMPTS, quiet=True) | more
  model = moejax.load(tiny_model.directory(family))
  return studies.Study(model, Mode(), pathlib.Path(_FOLDER.name) / name, **options)


@functools.cache
def quick() -> studies.Study:
  """The quickstart of a tiny OLMoE."""
  made = study("olmoe", "quick", prompts=PROMPTS[:1])
  quickstart.run(made, route())
  return made


@functools.cache
def route() -> route_studies.Study:
  """The quickstart's other half, on less text."""
  made = study("olmoe", "quick")
  return route_studies.Study(
    made.model,
    Mode(),
    made.out / "route",
    text=route_studies.read_text(None, "calibration"),
    num_sequences=4,
    length=40,
    prefill=12,
    quiet=True,
  )


def test_the_quickstart_says_what_its_tables_say(capsys):
  made = quick()
  text = "\n".join(quickstart.summary(made, route()))
  counts = tables.BASIN_COUNTS.read(made.out)
  assert {(row["scheme"], row["horizon"]) for row in counts} == {
    (scheme, horizon) for scheme in "AB" for horizon in (8, 16, 32, 64)
  }
  for row in counts:
    assert f"{row['scheme']}: {row['orders']} orders, {row['classes']} classes" in text
    assert (row["orders"], row["classes"]) == {"A": (24, 24), "B": (24, 12)}[row["scheme"]]
  assert "is another one" in text.replace("\n", " ")
  assert (made.out / "figures" / "basins.svg").is_file()
  (row,) = route_tables.FOUR_RUN.read(route().out)
  assert f"{row['excess_total']:+.4f} nats per token" in text
  assert row["control"] == 0 and (route().out / "causal_graph.svg").is_file()
  with np.load(route().out / "four_run.npz") as kept:
    excess = (kept["nll_qf"].astype(np.float64) - kept["nll_cc"]).mean()
    assert excess == pytest.approx(row["excess_total"], rel=1e-12)
    assert kept["flips"].shape[1:] == kept["nll_qf"].shape


@pytest.mark.parametrize("check", [audit.basins, audit.mhc, audit.kv, audit.certificate])
def test_the_audit_of_the_quickstart_is_clean(check):
  rows = [tables.TABLES[name].read(quick().out) for name in check.tables]
  assert list(check(quick(), *rows)) == []
  assert all(rows) or check is audit.mhc  # no layer before the first


@pytest.mark.parametrize(
  ("check", "table", "change", "message"),
  [
    (audit.basins, "basin_counts", dict(texts=99), "texts is 99"),
    (audit.basins, "basin_counts", dict(outputs=1), "outputs is 1"),
    (audit.basins, "basin_rank_frequency", dict(order_count=3), "basin volumes"),
    (audit.basins, "branches", dict(tokens="1,2,3"), "basin volumes"),
    (audit.basins, "branches", None, "classes is"),
    (audit.mhc, "mhc_equivalence", dict(post_mhc_equal=False), "post_mhc_equal is"),
    (audit.mhc, "mhc_equivalence", None, "post_mhc_checkpoints is"),
    (audit.mhc, "mhc_equivalence_summary", dict(post_state_equal=False), "post_state_equal"),
    (audit.kv, "kv_equivalence", dict(state_equal=False), "states_equal is"),
    (audit.kv, "kv_equivalence_layers", dict(differing=10**6), "differing is"),
    (
      audit.kv,
      "kv_equivalence_summary",
      dict(next_token_equal=False, vacuous=False),
      "next_token_equal is False",
    ),
    (audit.certificate, "certificate", dict(certified=-1), "certified is"),
  ],
)
def test_the_audit_finds_what_was_planted(check, table, change, message):
  """A wrong value in the first row that counts, or that row missing."""
  rows = {name: copy.deepcopy(tables.TABLES[name].read(quick().out)) for name in check.tables}
  at = next(i for i, row in enumerate(rows[table]) if row.get("compared", True))
  if change is None:
    del rows[table][at]
  else:
    rows[table][at].update(change)
  assert any(message in found for found in check(quick(), *rows.values()))


def test_the_audit_refuses_a_folder_with_a_table_missing_or_of_another_study():
  with pytest.raises(FileNotFoundError, match=r"no such table"):
    audit.run(quick())
  other = dataclasses.replace(quick(), seed=1)
  with pytest.raises(ValueError, match=r"branches: seed is 20260722, expected 1"):
    audit.load(other.out, tables.BRANCHES, other.identity)


def test_bad_input_is_one_sentence():
  with pytest.raises(ValueError, match=r"unknown prompt id 'en-x'"):
    studies.find_prompts(["en-x"])
  with pytest.raises(ValueError, match=r"layer 0 has no routed experts; those that have: 1"):
    study("deepseek", "none", fork_layer=0)
  with pytest.raises(ValueError, match=r"a run with another seed: it is 20260722, expected 5"):
    dataclasses.replace(quick(), seed=5).claim()
  assert tables.BRANCHES.read(quick().out)
  with pytest.raises(ValueError, match=r"mediation: expected at least 2 prompts"):
    run_all.run(quick())


def test_a_guard_refuses_a_state_with_one_bit_changed(monkeypatch):
  """The persistent state that the native run of the substitution comes to is not the captured."""
  real, calls = kv_equivalence.follow, []

  def disturbed(*args, **more):
    found = real(*args, **more)
    calls.append(args)
    keys = found.states[0].layers[0].keys
    bits = keys.view("uint16").at[0, 0, 0, 0].set(keys.view("uint16")[0, 0, 0, 0] ^ 1)
    layer = found.states[0].layers[0].replace(keys=bits.view(keys.dtype))
    state = found.states[0].replace(layers=(layer, *found.states[0].layers[1:]))
    return dataclasses.replace(found, states=(state, *found.states[1:]))

  monkeypatch.setattr(kv_equivalence, "follow", disturbed)
  with pytest.raises(ValueError, match=r"before the addition 1 values of the state are not"):
    kv_equivalence.run(dataclasses.replace(quick(), out=quick().out / "guard"))
  assert len(calls) == 1


@pytest.mark.parametrize(
  ("texts", "chosen"),
  [
    (["511", "512", "612"], (1, 0, False)),  # native is 511; leaves it late
    (["611", "511", "612"], (1, 0, True)),  # never late: one that can be moved
    (["611", "612"], (0, 0, True)),  # every branch leaves at once
    (["513", "512"], (1, 1, False)),  # the first can't be rebuilt
    (["513", "511"], (1, 1, True)),
  ],
)
def test_the_class_that_is_substituted(texts, chosen):
  states = np.arange(1, len(texts) + 1, dtype=np.float32)[:, None]
  event = types.SimpleNamespace(post_block=np.zeros(1, np.float32))
  fork = types.SimpleNamespace(event=event, output=range(len(texts)), post_block=states)
  tokens = np.array([[0, *map(int, text)] for text in texts])
  sweep = types.SimpleNamespace(fork=fork, tokens=tokens, native=np.array([0, 5, 1, 1]))
  refused = [states[row].tobytes() for row, text in enumerate(texts) if text == "513"]
  found = substitution._choose(sweep, 4, lambda native, state: state.tobytes() not in refused)
  assert found == chosen


def test_a_difference_that_does_not_rebuild_the_state_is_seen():
  native, branch = np.float32([1e8, 1.0, -0.0]), np.float32([1.0, 1.0, -0.0])
  assert not mhc_equivalence.rebuilt(native, np.float32([0.3, 1.0, 0.0]))
  assert mhc_equivalence.rebuilt(branch, branch)
  assert mhc_equivalence.rebuilt(np.float32([1.0, -0.0]), np.float32([1.5, -0.0]))


@pytest.mark.slow
def test_every_branch_of_a_sweep_is_the_branch_alone_in_another_process():
  made = study("olmoe", "alone", prompts=PROMPTS[:1])
  found = branch_sweep.sweep(made, PROMPTS[0], made.scheme, 16)
  jobs = [dict(scheme="B", order=order.tolist()) for order in found.fork.orders]
  (alone,) = run_alone(made, made.encode(PROMPTS[0]), 16, jobs)
  assert (alone["tokens"] == found.tokens).all()
  for state, output in zip(alone["blocks"], found.fork.output):
    assert_same_bits(state[made.fork_layer], found.fork.post_block[output])


@pytest.mark.slow
@pytest.mark.parametrize("family", list(LAYER))
def test_the_whole_study_of_a_family(family, monkeypatch):
  monkeypatch.setattr(schedule_runs, "REQUESTS", 4)
  made = study(family, f"whole-{family}")
  made.claim()
  said = run_all.run(made)
  assert any(line.startswith("audit: ") for line in said)
  (replay,) = [line for line in said if line.startswith("native replay")]
  assert replay.startswith("native replay: 2 of 2 prompts equal")
  for row in tables.CERTIFICATE.read(made.out):
    assert row["false_proofs"] == 0
  forms(made)


def forms(made):
  """Two people fill in copies of the form and disagree about the first text."""
  with open(made.out / "annotation_blind.csv", encoding="utf-8", newline="") as file:
    header, *blank = csv.reader(file)
  assert header == ["item", "text", "label"] and {row[2] for row in blank} == {""}
  paths = [made.out / f"{name}.csv" for name in ("ann", "ben")]
  for path, first in zip(paths, ("hiring", "layoffs")):
    labels = [first, *["other"] * (len(blank) - 1)]
    rows = [[*row[:2], label] for row, label in zip(blank, labels)]
    event_direction.annotation.write_csv(path, header, rows)
  event_direction.run(dataclasses.replace(made, resume=True), [str(path) for path in paths])
  (pair,) = [r for r in tables.AGREEMENT.read(made.out) if "rule" not in (r["first"], r["second"])]
  assert {pair["first"], pair["second"]} == {"ann", "ben"}
  assert (pair["compared"], pair["agreed"]) == (len(blank), len(blank) - 1)
  unique = tables.EVENT_UNIQUE.read(made.out)
  assert [row["consensus"] for row in unique] == [None, *["other"] * (len(blank) - 1)]
  people = [row for row in tables.EVENT_COUNTS.read(made.out) if row["source"] == "people"]
  disputed = next(row["class_count"] for row in unique if row["consensus"] is None)
  by_label = {row["label"]: row["class_count"] for row in people}
  assert by_label[None] == disputed and by_label.get("other", 0) == people[0]["classes"] - disputed
  pairs = [r for r in tables.CONFUSION.read(made.out) if r["first_label"] == "hiring"]
  assert any(row["second_label"] == "layoffs" and row["count"] == 1 for row in pairs)
  path = made.out / "annotation_blind.csv"  # filled in where it lies: kept
  path.write_bytes(paths[0].read_bytes())
  event_direction.run(dataclasses.replace(made, resume=True), [str(path)])
  assert path.read_bytes() == paths[0].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["persistent", "breadth"])
def test_a_killed_run_goes_on_to_the_same_tables(protocol, tmp_path):
  def start(out, *more):
    command = [sys.executable, "-m", f"experiments.reduction.{protocol}"]
    flags = [f"--model={tiny_model.directory('olmoe')}", f"--out={out}", "--fork_layer=0", *more]
    return subprocess.Popen([*command, *flags], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."})

  raw = {"persistent": tables.TRAJECTORIES, "breadth": tables.BREADTH_BRANCHES}[protocol]
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  assert start(whole).wait() == 0
  process = start(killed)
  while not (raw.path(killed).is_file() and len(raw.read(killed)) > 5):
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  before = len(raw.read(killed))
  assert before < len(raw.read(whole))
  assert start(killed, "--resume").wait() == 0
  for path in whole.glob("*.tsv"):
    assert path.read_bytes() == (killed / path.name).read_bytes()


def test_directions_that_are_too_rare_are_drawn_from_texts_and_say_so():
  key = [
    event_direction.annotation.ClassText(i, 2, "a" if i < 8 else f"b{i % 2}") for i in range(30)
  ]
  form = event_direction.annotation.blind_form([row.text for row in key], 1)
  rule = event_direction.annotation.apply_rule(form, lambda text: "other")
  drawn, labels = event_direction.draw(key, rule)
  assert len(set(drawn)) == 10
  assert sorted(labels[c] for c in drawn) == ["other, text 1"] * 5 + ["other, text 2"] * 5
  assert {key[c].text for c in drawn} == {"b0", "b1"}
  both = event_direction.annotation.apply_rule(
    form, lambda text: {"b0": "hiring", "b1": "layoffs"}.get(text, "other")
  )
  drawn, labels = event_direction.draw(key, both)
  assert [labels[c] for c in drawn] == ["hiring"] * 5 + ["layoffs"] * 5


@pytest.mark.parametrize(
  ("texts", "wanted"),
  [("aaaaaabbbccc", ["a"] * 6), ("aaabbbbc", ["b"] * 3 + ["a"] * 3), ("aaaa", ["a"] * 4)],
)
def test_few_classes_are_drawn_as_far_as_they_go(texts, wanted):
  key = [event_direction.annotation.ClassText(i, 2, text) for i, text in enumerate(texts)]
  form = event_direction.annotation.blind_form(texts, 1)
  rule = event_direction.annotation.apply_rule(form, lambda text: "other")
  drawn, _ = event_direction.draw(key, rule)
  assert len(set(drawn)) == len(drawn) and [texts[c] for c in drawn] == wanted
