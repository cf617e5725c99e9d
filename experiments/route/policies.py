"""Repair of chosen tokens, run and not summed: an oracle, chance, the margin; and a softened gate.

    python -m experiments.route.policies --model=olmoe-nano --out=out/route
    ... --predictor=my_package.my_module:score

A policy imposes clean routes on a mask of decode tokens, as many in each sequence as the oracle's.
A predictor of your own is called with features float64 [tokens, layers · 5] (see
`moejax.analysis.detection.layer_features`) and gives a score for each token, high where clean
routes shall be imposed. policies.tsv, smoothing.tsv. A minute for a nano model.
"""

import dataclasses
import importlib

from absl import flags
import numpy as np

from experiments.route import study as studies
from experiments.route.detection import features
from experiments.route.measure import estimate, mean_of, RESAMPLES, share_of
from moejax.analysis.bootstrap import cluster_bootstrap, ratio_of_sums
from moejax.report import route_tables as tables

TABLES = (tables.POLICIES, tables.SMOOTHING)
SEEDS = 5  # of the random policy
TAU = 0.1  # quantile of clean margins
_PREDICTOR = flags.DEFINE_string("predictor", None, "module:function, a policy of your own.")


def run(study: studies.Study, predictor: str | None = None) -> list[str]:
  """Writes both tables, a predictor of the user's among the policies; returns what to say."""
  chosen = masks(study, predictor)
  losses = {
    name: run_mask(study, mask) for name, mask in study.progress(chosen.items(), "policies")
  }
  rows = policy_rows(study, chosen, losses)
  study.write(tables.POLICIES, rows, "policies")
  softened = smoothing_rows(study)
  study.write(tables.SMOOTHING, softened, "policies")
  return [f"policies: {describe(row)}" for row in rows] + [
    f"smoothing, {r['scope']}: {r['delta']:+.4f} nats" for r in softened if r["delta"] is not None
  ]


def masks(study: studies.Study, predictor: str | None) -> dict[str, np.ndarray]:
  """bool [B, N] of each policy, equally many tokens in each sequence."""
  four = study.four
  any_flip = four.flips()[study.routers].any(axis=0)
  oracle = any_flip & (four.route_forward > 0)
  counts, shape = oracle.sum(axis=1), oracle.shape
  rng = np.random.default_rng(study.seed)
  found = dict(oracle=oracle)
  for number in range(SEEDS):
    found[f"random {number}"] = highest(rng.random(shape), counts)
  found["margin"] = highest(-four.qf.margins[study.routers[-1]], counts)
  if predictor:
    found[predictor] = highest(predicted(study, predictor), counts)
  return found


def predicted(study: studies.Study, name: str) -> np.ndarray:
  """float [B, N] of the user's predictor.

  Raises:
    ValueError: no such function, or a result of another shape.
  """
  try:
    module, function = name.split(":")
    score = getattr(importlib.import_module(module), function)
  except (ValueError, ImportError, AttributeError) as error:
    raise ValueError(f"--predictor={name}: expected module:function ({error}).") from None
  known = features(study)["cross_layer"]
  flat = known.reshape(-1, known.shape[-1])
  scores = np.asarray(score(flat))
  if scores.shape != (len(flat),):
    raise ValueError(f"--predictor={name} gave {scores.shape}, expected {(len(flat),)}.")
  return scores.reshape(known.shape[:2])


def highest(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """bool [B, N]: the counts[b] highest of each row; of equals the earlier."""
  order = np.argsort(-scores, axis=1, kind="stable")
  rank = np.argsort(order, axis=1, kind="stable")
  return rank < counts[:, None]


def run_mask(study: studies.Study, mask: np.ndarray) -> np.ndarray:
  """float64 [B, N]: losses of the disturbed run with clean routes at the tokens of a mask."""
  whole = np.zeros((len(mask), study.length - 1), bool)
  whole[:, study.prefill - 1 :] = mask
  return study.run(study.disturbed, study.clean.pins(whole[None])).nll.astype(np.float64)


def policy_rows(study: studies.Study, chosen, losses) -> list[dict]:
  """Recovered shares, and how far above chance; random is the mean of its seeds."""
  qf, ceiling = study.four.qf.nll.astype(np.float64), study.four.route_forward
  recovered = {name: qf - loss for name, loss in losses.items()}
  chance = np.mean([recovered.pop(f"random {n}") for n in range(SEEDS)], axis=0)
  recovered["random"] = chance
  rows = []
  for name, values in recovered.items():
    difference = None if name == "random" else share_of(values - chance, ceiling, study.seed)
    rows.append(
      dict(
        policy=name,
        pinned_tokens=int(chosen.get(name, chosen["oracle"]).sum()),
        **estimate("recovery", share_of(values, ceiling, study.seed)),
        **estimate("recovered", mean_of(values, study.seed)),
        **estimate("minus_random", difference),
        paper=study.paper("policies", name, "minus_random"),
      )
    )
  return rows


def describe(row: dict) -> str:
  """One line."""
  if row["recovery"] is None:
    return f"{row['policy']} recovers {row['recovered']:.4f} nats; no routed share to compare with"
  line = f"{row['policy']} recovers {row['recovery']:.2f} of the routed share"
  if row["minus_random"] is None:
    return line
  low, high = (row[f"minus_random_{end}"] for end in ("low", "high"))
  return f"{line}, {row['minus_random']:+.3f} against random [{low:.3f}, {high:.3f}]"


def smoothing_rows(study: studies.Study) -> list[dict]:
  """The gate softened at its boundary in the disturbed run."""
  four, layers = study.four, study.routers
  tau = float(np.quantile(study.clean.margins[layers], TAU))
  execution = study.disturbed.execution.replace(softening=np.float32(tau))
  softened = study.run(dataclasses.replace(study.disturbed, execution=execution))
  delta = four.qf.nll.astype(np.float64) - softened.nll
  flipped = four.flips()[layers].any(axis=0)
  scopes = {
    "harmful flips": flipped & (four.route_forward > 0),
    "beneficial flips": flipped & (four.route_forward < 0),
    "all tokens": np.ones(flipped.shape, bool),
  }
  rows = []
  for scope, mask in scopes.items():
    sums = np.where(mask, delta, 0).sum(axis=1), mask.sum(axis=1)
    found = None
    if (sums[1] > 0).all():
      found = cluster_bootstrap(ratio_of_sums, *sums, seed=study.seed, resamples=RESAMPLES)
    rows.append(
      dict(
        scope=scope,
        scope_tokens=int(mask.sum()),
        tau=tau,
        **estimate("delta", found),
        paper=study.paper("smoothing", scope.split()[0], "delta"),
      )
    )
  return rows


if __name__ == "__main__":
  studies.main(lambda study: run(study, _PREDICTOR.value))
