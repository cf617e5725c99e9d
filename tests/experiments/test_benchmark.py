"""The benchmark runs, and only between contestants that agree. No test measures time."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp

from experiments import timing
from moejax.report import tables

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.benchmark", *arguments],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )


def test_orders_part_checks_bits_and_writes_a_table(tmp_path):
  done = run("--parts=orders", "--seconds=0", f"--out={tmp_path}/b.tsv")
  assert done.returncode == 0, done.stderr
  rows = tables.read_tsv(tmp_path / "b.tsv")
  assert {row["case"] for row in rows} == {"P32", "C", "A", "B"}
  contestants = {row["contestant"] for row in rows}
  assert {"all orders", "fingerprints", "NumPy", "XLA fill of the same bytes"} <= contestants
  assert all(float(row["median_ms"]) > 0 and int(row["rounds"]) >= 5 for row in rows)


def test_unknown_part_is_refused():
  done = run("--parts=orders,nothing")
  assert done.returncode != 0
  assert "unknown part nothing: expected orders, dot, grouped" in done.stderr + done.stdout


def test_compare_times_every_contestant_in_every_round():
  calls = {"a": 0, "b": 0}

  def contestant(name):
    def run():
      calls[name] += 1
      return jnp.zeros(())

    return run

  times = timing.compare({name: contestant(name) for name in calls}, seconds=0.0)
  assert {name: len(rounds) for name, rounds in times.items()} == {"a": 5, "b": 5}
  assert calls == {"a": 7, "b": 7}  # two warm-up calls


def test_rows_report_medians_and_ratios_within_rounds():
  times = {"base": [2.0, 4.0, 6.0], "ours": [1.0, 1.0, 6.0]}
  rows = list(timing.rows_of("part", "case", times, "base", work=8e9, unit="GFLOP/s"))
  assert rows[1] == ("part", "case", "ours", "1000", "8", "GFLOP/s", "2", "base", "3")
