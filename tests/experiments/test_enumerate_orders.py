"""The first script, as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moejax.report import tables

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.enumerate_orders", *arguments],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )


def test_random_terms(tmp_path):
  done = run("--random", "--num_terms=4", "--hidden=100", f"--out={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert "written:" in done.stdout
  summary = {row["scheme"]: row for row in tables.read_tsv(tmp_path / "summary.tsv")}
  assert [summary[s]["classes"] for s in ("P32", "C", "A", "B", "EXACT")] == [
    "12",
    "12",
    "24",
    "12",
    "1",
  ]
  assert summary["C"]["distinct_outputs"] == "1" and summary["C"]["linf_max"] == "0"
  orders = tables.read_tsv(tmp_path / "orders.tsv")
  assert len(orders) == 5 * 24 and len({(r["scheme"], r["order_number"]) for r in orders}) == 120
  assert orders[0]["order"] == "0,1,2,3"
  assert json.loads((tmp_path / "environment.json").read_text())["rounding"] == "nearest-even"
  assert (tmp_path / "spread.png").read_bytes().startswith(b"\x89PNG")


def test_terms_from_a_file_and_a_sample_of_orders(tmp_path):
  terms = np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32)
  np.savez(tmp_path / "terms.npz", terms=terms)
  arguments = (f"--terms={tmp_path}/terms.npz", "--scheme=B,A", f"--out={tmp_path}/out")
  assert run(*arguments).returncode == 0
  rows = tables.read_tsv(tmp_path / "out" / "summary.tsv")
  assert [(r["scheme"], r["num_orders"], r["sampled"]) for r in rows] == [
    ("B", "360", "True"),
    ("A", "720", "True"),
  ]
  first = (tmp_path / "out" / "orders.tsv").read_bytes()
  assert run(*arguments).returncode == 0
  assert (tmp_path / "out" / "orders.tsv").read_bytes() == first


@pytest.mark.parametrize(
  "arguments,message",
  [
    (("--terms=nowhere.npz",), "enumerate_orders: nowhere.npz: no such file."),
    (("--random", "--scheme=B,Z"), "enumerate_orders: unknown contract 'Z': expected one of"),
    ((), "give either --terms=FILE.npz or --random"),
  ],
)
def test_bad_calls_end_with_a_sentence_and_no_traceback(arguments, message):
  done = run(*arguments)
  assert done.returncode != 0
  assert message in done.stderr + done.stdout and "Traceback" not in done.stderr


def test_nan_terms_are_named(tmp_path):
  terms = np.ones((3, 4), np.float32)
  terms[1, 2] = np.nan
  np.savez(tmp_path / "terms.npz", terms=terms)
  done = run(f"--terms={tmp_path}/terms.npz", f"--out={tmp_path}/out")
  assert "terms[1, 2] is NaN" in done.stderr and "Traceback" not in done.stderr
  assert not (tmp_path / "out").exists()
