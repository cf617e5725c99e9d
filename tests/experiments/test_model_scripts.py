"""The generate and trace scripts, run as a user runs them, on a tiny checkpoint."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from moejax.report import tables
from tests.references import cases, weights

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  folder = tmp_path_factory.mktemp("olmoe_text")
  return weights.write_checkpoint(cases.CASES["olmoe_text"], folder)


def run(script, *arguments):
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{script}", *arguments],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )


def test_generate_writes_texts_and_a_record(checkpoint, tmp_path):
  prompts = ["--prompt=why the sheep", "--prompt=why"]
  options = ["--max_new_tokens=4", "--scheme=B", "--order_seed=1", f"--out={tmp_path}"]
  done = run("generate", f"--model={checkpoint}", *prompts, *options)
  assert done.returncode == 0, done.stderr
  rows = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
  assert [len(row["token_ids"]) for row in rows] == [4, 4]
  assert rows[0]["text"].startswith("why the sheep")
  assert rows[0]["prompt_ids"] == list(b"why the sheep")
  record = json.loads((tmp_path / "run.json").read_text())
  assert record["family"] == "olmoe"
  assert record["mode"]["arithmetic"] == "canonical"
  assert record["contract"]["order"] == "slot"
  assert (record["scheme"], record["order_seed"]) == ("B", 1)
  assert len(record["weights_sha256"]) == 64


def test_trace_writes_routes_and_states(checkpoint, tmp_path):
  done = run(
    "trace", f"--model={checkpoint}", "--prompt=sheep", "--max_new_tokens=3", f"--out={tmp_path}"
  )
  assert done.returncode == 0, done.stderr
  config = cases.CASES["olmoe_text"].config
  layers, top_k = config["num_hidden_layers"], config["num_experts_per_tok"]
  rows = tables.read_tsv(tmp_path / "routes.tsv")
  assert len(rows) == 8 * layers
  for row in rows:
    ids = [int(i) for i in row["expert_ids"].split(",")]
    assert ids == sorted(set(ids))
    assert len(ids) == top_k
    assert sorted(map(int, row["slots"].split(","))) == list(range(top_k))
    assert float(row["margin"]) >= 0
  assert [int(row["token_id"]) for row in rows[::layers]][:5] == list(b"sheep")
  states = safetensors.numpy.load_file(tmp_path / "states.safetensors")
  assert states["post_block"].shape == (layers, 8, config["hidden_size"])
  persistent = safetensors.numpy.load_file(tmp_path / "persistent_state.safetensors")
  assert persistent["position"] == 8
  assert persistent["layers.0.keys"].shape[1] == 8
  assert np.isfinite(persistent["layers.0.keys"]).all()


def test_scripts_refuse_in_one_sentence(checkpoint, tmp_path):
  for arguments, sentence in (
    ([f"--model={tmp_path}", "--prompt=a"], "expected a directory with config.json"),
    ([f"--model={checkpoint}"], "give either --prompt or --token_ids"),
    ([f"--model={checkpoint}", "--token_ids=1,9999"], "is outside the vocabulary of 320"),
  ):
    done = run("generate", *arguments)
    assert done.returncode != 0
    assert sentence in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
