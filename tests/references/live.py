"""Cases run live with torch: what to record of them, and whether they are fair.

A case is fair if every correct float32 implementation must take the same decisions: no route, no
indexer's pick and no greedy token is close.
"""

import dataclasses
import itertools
import tempfile

import numpy as np

from tests.references import deepseek_moe, native, weights
from tests.references.cases import Case

# The smallest margins: logits (DeepSeek-V4: scores), index scores, logits.
LIMITS = {"route": 1e-4, "pick": 1e-3, "greedy": 1e-3}

_ROUTES = ("moe_layers", "router_logits", "ids", "weights", "margins", "ties")
_OUTPUTS = ("tokens", "logits", "nll", "decode_logits", "greedy_ids", "greedy_margins")


def run(case: Case, directory=None) -> dict[str, np.ndarray]:
  """All arrays of a case (`traces.trace`), from the checkpoint in a directory or a fresh one."""
  if directory is None:
    with tempfile.TemporaryDirectory() as fresh:
      return run(case, weights.write_checkpoint(case, fresh))
  return reference(case.family).run(directory, weights.tokens(case), case.prompt, case.new)


def reference(family: str):
  """The module that runs a family's checkpoints: transformers', or ours where that has none."""
  return deepseek_moe if family == "deepseek" else native


def run_fair(case: Case) -> dict[str, np.ndarray]:
  """The same; a case with close decisions is refused."""
  arrays = run(case)
  for kind, limit in LIMITS.items():
    margin = _closest(arrays, kind)
    if margin <= limit:
      raise ValueError(
        f"{case.name}: the closest {kind} decision of seed {case.seed} has a margin of "
        f"{margin:.1e}, expected more than {limit:.0e}; another seed is needed (make --search)."
      )
  return arrays


def fair_seed(case: Case) -> int:
  """The first seed with margins of twice the limits, which are then kept on every machine."""
  for seed in itertools.count():
    arrays = run(dataclasses.replace(case, seed=seed))
    if all(_closest(arrays, kind) > 2 * limit for kind, limit in LIMITS.items()):
      return seed


def record(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The part of `run` that is kept (`cases.reference`)."""
  out = {name: arrays[name] for name in (*_ROUTES, *_OUTPUTS)}
  out |= dict(post_block=arrays["post_block"][-1], weights_sha256=weights.digest(case))
  if "index_ids" in arrays:
    out["index_ids"] = arrays["index_ids"]
  return out


def _closest(arrays, kind) -> float:
  return float(arrays[f"closest_{kind}"])
