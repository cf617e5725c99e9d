"""The core contrasts in a process of their own; used by `process_replication`.

    python -m experiments.route.single_process JOB.npz RESULT.json

The job names the model, mode, prefill and disturbance (bits and strength of the KV quantiser), how
often to repeat, and arms: name → contract and order seed of the computation, or none of them for
the native one. It holds the tokens.
"""

import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from experiments.route import study as studies
import moejax
from moejax import combine
from moejax.inference import Condition, KvQuantization, Reduction, run_routed
from moejax.models import Mode

_ROOT = pathlib.Path(__file__).parents[2]
_MODULE = "experiments.route.single_process"


def main(job_path: str, result_path: str) -> None:
  """Does the runs of a job."""
  with np.load(job_path) as held:
    tokens, job = held["tokens"], json.loads(str(held["job"]))
  model, mode = moejax.load(job["model"]), Mode(**job["mode"])
  disturbance = KvQuantization(job["bits"], job["strength"])
  results = []
  for arm, repeat in itertools.product(job["arms"], range(job["repeats"])):
    runs = core(model, mode, tokens, disturbance, job["prefill"], **job["arms"][arm])
    total = runs["qf"].astype(np.float64) - runs["cc"]
    routed = runs["qf"].astype(np.float64) - runs["qp"]
    digest = hashlib.sha256(b"".join(runs[name].tobytes() for name in ("cc", "qp", "qf", "ct")))
    results.append(
      dict(
        arm=arm,
        repeat=repeat,
        pid=os.getpid(),
        excess_total=float(total.mean()),
        route_forward=float(routed.mean()),
        nll_sha256=digest.hexdigest(),
      )
    )
  pathlib.Path(result_path).write_text(json.dumps(results), encoding="utf-8")


def core(model, mode, tokens, disturbance, prefill, scheme, order_seed) -> dict[str, np.ndarray]:
  """Losses float32 [B, N] of the four runs, all of them summed as the scheme says."""
  execution = Condition().execution
  if scheme is not None:
    reduction = Reduction(combine.named(scheme), order_seed)
    execution = reduction.condition(model, mode, *tokens.shape).execution
  quantised = disturbance.condition(model, mode, *tokens.shape).execution
  kv = dict(kv_bits=quantised.kv_bits, kv_strength=quantised.kv_strength)
  clean, disturbed = Condition(mode, execution), Condition(mode, execution.replace(**kv))
  run = lambda *args: run_routed(model, tokens, *args, prefill=prefill)
  cc, qf = run(clean), run(disturbed)
  runs = dict(cc=cc, qf=qf, qp=run(disturbed, cc.pins()), ct=run(clean, qf.pins()))
  return {name: found.nll for name, found in runs.items()}


def run_alone(study: studies.Study, tokens: np.ndarray, **job: Any) -> list[dict[str, Any]]:
  """The results of a job in a fresh process.

  Raises:
    RuntimeError: the process failed; with the end of what it said.
  """
  job |= dict(
    model=str(study.model.directory.resolve()),
    mode=vars(study.mode),
    prefill=study.prefill,
    bits=study.disturbance.bits,
    strength=study.disturbance.strength,
  )
  with tempfile.TemporaryDirectory() as folder:
    paths = [pathlib.Path(folder) / name for name in ("job.npz", "result.json")]
    np.savez(paths[0], tokens=tokens, job=np.array(json.dumps(job)))
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
      [sys.executable, "-m", _MODULE, *map(str, paths)],
      env={**os.environ, "PYTHONPATH": path},
      stderr=subprocess.PIPE,
      text=True,
      check=False,
    )
    if done.returncode:
      raise RuntimeError(f"a process ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(paths[1].read_text(encoding="utf-8"))


if __name__ == "__main__":
  main(*sys.argv[1:])
