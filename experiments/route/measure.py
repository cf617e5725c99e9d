"""Columns of contrasts: estimates with cluster intervals, the routed fraction, divergences."""

from collections.abc import Sequence

import numpy as np

from moejax.analysis.bootstrap import cluster_bootstrap, Estimate, mean, ratio_of_sums
from moejax.analysis.replication import sequences_needed
from moejax.inference import FourRun
from moejax.report.schema import Row

RESAMPLES = 2000
INTERVAL = f"95% percentile bootstrap of sequences, {RESAMPLES} resamples"
CONTRASTS = ("excess_total", "excess_compute", "route_forward", "route_pure", "interaction")


def estimate(name: str, found: Estimate | None) -> Row:
  """The three columns of an estimate; none of them where there is none."""
  values = (None,) * 3 if found is None else (found.value, found.low, found.high)
  return dict(zip((name, f"{name}_low", f"{name}_high"), values))


def mean_of(per_token: np.ndarray, seed: int) -> Estimate:
  """The mean of [B, N] tokens; sequences are resampled."""
  return cluster_bootstrap(mean, per_token.mean(axis=1), seed=seed, resamples=RESAMPLES)


def share_of(numerator: np.ndarray, denominator: np.ndarray, seed: int) -> Estimate | None:
  """Σ numerator / Σ denominator of [B, N] tokens; none unless the denominator stands above zero.

  A ratio of sums, never a mean of ratios; its denominator must be positive with an interval that
  excludes zero.
  """
  below = mean_of(denominator, seed)
  if not below.low > 0:
    return None
  sums = numerator.sum(axis=1), denominator.sum(axis=1)
  return cluster_bootstrap(ratio_of_sums, *sums, seed=seed, resamples=RESAMPLES)


def contrasts(four: FourRun, routers: Sequence[int], seed: int) -> Row:
  """The columns that every four runs have.

  Args:
    four: the runs, with divergences.
    routers: layers where a router decides; the last one is the scoring layer.
    seed: of the resamples.
  """
  per_token = (four.total, four.compute, four.route_forward, four.route_pure, four.interaction)
  row, found = dict(clean_nll=float(four.cc.nll.mean(dtype=np.float64))), {}
  for name, values in zip(CONTRASTS, per_token):
    found[name] = mean_of(values, seed)
    row |= estimate(name, found[name])
  rmf = share_of(four.route_forward, four.total, seed)
  kl_total, kl_pinned = (run.kl.astype(np.float64) for run in (four.qf, four.qp))
  flips = four.flips()[list(routers)]
  controls = four.controls
  return (
    row
    | dict(interpretable=rmf is not None)
    | estimate("rmf", rmf)
    | dict(kl_total=float(kl_total.mean()), kl_pinned=float(kl_pinned.mean()))
    | estimate("kl_routed_share", share_of(kl_total - kl_pinned, kl_total, seed))
    | dict(
      flip_rate=float(flips[-1].mean()),
      flip_rate_any=float(flips.any(axis=0).mean()),
      ties=0 if four.qf.ties is None else int(four.qf.ties[routers[-1]].sum()),
      control_sequences=controls.sequences,
      control=max(controls.clean_pinned, controls.disturbed_pinned, controls.idle or 0.0),
      sequences_needed=sequences_needed(four.total.mean(axis=1)),
      route_sequences_needed=sequences_needed(four.route_forward.mean(axis=1)),
    )
  )


def describe(row: Row) -> str:
  """RMF of a row, or that there is none and what it would take."""
  excess = f"excess {row['excess_total']:.4f} nats"
  if not row["interpretable"]:
    needed = row["sequences_needed"]
    power = "" if needed is None else f" (an excess of that size needs {needed} sequences)"
    return f"{excess}, RMF NOT INTERPRETABLE{power}"
  return f"{excess}, RMF {row['rmf']:.2f} [{row['rmf_low']:.2f}, {row['rmf_high']:.2f}]"
