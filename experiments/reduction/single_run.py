"""Branches, or the native run, one at a time in a process of its own; used by the other protocols.

    python -m experiments.reduction.single_run JOB.json RESULT.npz

The job names the model, mode, prompt ids, layer, emitted tokens and runs: each {"scheme", "order"},
or {} for the run without any probe. The result has the record, and for each run its token ids and
the states after each block of the event.
"""

from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from experiments.reduction import study as studies
import moejax
from moejax import combine
from moejax.inference import decode, prefill
from moejax.inference.batches import state_length
from moejax.inference.branches import branch_execution
from moejax.inference.generate import continue_greedily, greedy
from moejax.inference.trajectory import idle_execution, STEP_TAPS
from moejax.models import Mode
from moejax.report.record import run_record

_ROOT = pathlib.Path(__file__).parents[2]
_MODULE = "experiments.reduction.single_run"


def main(job_path: str, result_path: str) -> None:
  """Does the runs of a job."""
  job = json.loads(pathlib.Path(job_path).read_text(encoding="utf-8"))
  if job["threads"] and hasattr(os, "sched_setaffinity"):
    # XLA's pool has a thread for each processor that the process may use when it starts.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])
  model, mode = moejax.load(job["model"]), Mode(**job["mode"])
  length = job["length"] or state_length(len(job["prompt"]) + job["num_tokens"])
  tokens, blocks = [], []
  for run in job["runs"]:
    logits, state, _ = prefill(model, [job["prompt"]], length, mode=mode)
    first = greedy(logits)[0]
    execution = idle_execution(model, 1)
    if run:
      code = np.array([combine.named(run["scheme"]).code])
      execution = branch_execution(model, job["layer"], np.array([run["order"]], np.int32), code)
    logits, state, trace = decode(model, first, state, execution, mode=mode, taps=STEP_TAPS)
    rest = continue_greedily(model, logits, state, job["num_tokens"] - 1, mode=mode).tokens[0]
    tokens.append([int(first[0]), *rest.tolist()])
    blocks.append(np.asarray(trace["post_block"])[:, 0, 0])
  record = json.dumps(run_record(model, mode))
  np.savez(result_path, tokens=np.array(tokens), blocks=np.stack(blocks), record=np.array(record))


def run_alone(
  study: studies.Study,
  prompt: Sequence[int],
  num_tokens: int,
  runs: Sequence[dict[str, Any]],
  threads: Sequence[int | None] = (None,),
  length: int | None = None,
) -> list[dict[str, Any]]:
  """The runs of a job in fresh processes, one for each number of threads (None: all), at once.

  `length` is that of the states, where programs are to be those of the caller.

  Returns:
    For each process its "tokens" int [runs, N], "blocks" float32 [runs, L, ...], "record" and
    "exit".

  Raises:
    RuntimeError: a process failed; with the end of what it said.
  """
  job = dict(
    model=str(study.model.directory.resolve()),
    mode=vars(study.mode),
    prompt=list(map(int, prompt)),
    layer=study.fork_layer,
    num_tokens=num_tokens,
    length=length,
    runs=list(runs),
  )
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    folder = pathlib.Path(folder)
    processes = []
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    for number, limit in enumerate(threads):
      files = folder / f"{number}.json", folder / f"{number}.npz"
      files[0].write_text(json.dumps(dict(job, threads=limit)), encoding="utf-8")
      process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, *files],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
      )
      processes.append(stack.enter_context(process))
    results = []
    for number, process in enumerate(processes):
      said = process.communicate()[1]
      if process.returncode:
        raise RuntimeError(f"a run alone ended with {process.returncode}: {said[-500:]}")
      with np.load(folder / f"{number}.npz") as found:
        results.append({name: found[name] for name in found})
      results[-1].update(record=json.loads(str(results[-1]["record"])), exit=process.returncode)
    return results


if __name__ == "__main__":
  main(*sys.argv[1:])
