"""The benchmark runs, and only between contestants that agree. No test measures time."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import route_speed, timing
from moejax import checkpoints, inference, numerics
from moejax.models import Mode
from moejax.report import tables
from tests.experiments import tiny_model

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


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # warnings of the foreign libraries are theirs
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "qwen3_moe"])
def test_four_runs_step_by_step_are_the_four_runs(family):
  """In float32, where nothing but the order of sums differs."""
  import torch
  import transformers

  directory = tiny_model.directory(family)
  model = checkpoints.load(directory, "float32")
  tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 70)).astype(np.int32)
  four = inference.four_run(
    model, tokens, inference.KvQuantization(4), mode=Mode("fast", "float32"), controls=0
  )
  runs = [four.cc.nll, four.qf.nll, four.qp.nll, four.ct.nll]
  assert four.flips().any()
  gaps = [np.abs(a - b).max() for i, a in enumerate(runs) for b in runs[:i]]
  assert min(gaps) > 1e-3
  theirs = route_speed.Transformers(
    transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  )
  np.testing.assert_allclose(theirs.alone(tokens), runs, rtol=0, atol=1e-4)
  np.testing.assert_allclose(theirs.batch(tokens), runs, rtol=0, atol=1e-4)
  assert theirs.identity(tokens) == 0


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_quantiser_of_transformers_is_that_of_the_study():
  import torch

  x = np.random.default_rng(0).standard_normal((5, 7, 16)).astype(np.float32)
  x[2, 3] = 0
  expected = numerics.fake_quantize(x, 4)
  np.testing.assert_array_equal(route_speed.quantize(torch.from_numpy(x)).numpy(), expected)


def test_losses_that_differ_are_not_raced():
  ours = np.ones((4, 3, 5), np.float32)
  ours[1] += 0.1
  rows = list(route_speed.check_losses("m", {"moejax": ours, "theirs": ours[:, :2]}, 0.0))
  assert ("route", "m, Y_QF less Y_CC, 2 sequences", "theirs", "", "0.1000", "nats") in [
    row[:6] for row in rows
  ]
  for theirs, identity, message in (
    (ours + 0.03, 0, "theirs: Y_CC is 0.03 nats off"),
    (ours[:1].repeat(4, axis=0), 0, "4-bit KV does 0 nats"),
    (ours, 1e-5, "clean routes, imposed"),
  ):
    with pytest.raises(ValueError, match=message):
      list(route_speed.check_losses("m", {"moejax": ours, "theirs": theirs}, identity))
