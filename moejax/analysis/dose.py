"""Damage against dose: matched points, where the direct channel overtakes, the peak, its decline.

A dose is a mean excess over that of the same model's 4-bit full-strength point. RMF is the routed
share of damage, Σ excess_route / Σ excess_total.
"""

import itertools

import numpy as np

from moejax.analysis.bootstrap import cluster_bootstrap, Estimate, ratio_of_sums


def matched(dose: np.ndarray, band: float = 0.2) -> np.ndarray:
  """Whether doses are within the band of dose 1, its ends included; bool of the shape of `dose`."""
  dose = np.asarray(dose)
  return (1 - band <= dose) & (dose <= 1 + band)


def crossover(direct: np.ndarray, routed: np.ndarray) -> int | None:
  """The first step in which the direct channel grows by a larger factor than the routed one.

  Step i leads from point i to point i + 1. One that starts at a value of 0 or below has no factor
  and is passed over. None if there is no such step.

  Args:
    direct, routed: floats [S], mean excess of each channel by rising dose, nats.

  Raises:
    ValueError: channels that are not [S] each.
  """
  direct, routed = np.asarray(direct, np.float64), np.asarray(routed, np.float64)
  if direct.ndim != 1 or direct.shape != routed.shape:
    raise ValueError(f"both channels must be [S], got {direct.shape} and {routed.shape}.")
  steps = itertools.pairwise(zip(direct, routed))
  for step, ((direct_from, routed_from), (direct_to, routed_to)) in enumerate(steps):
    if min(direct_from, routed_from) > 0 and direct_to / direct_from > routed_to / routed_from:
      return step
  return None


def peak(rmf: np.ndarray) -> int | None:
  """The index of the largest RMF, the first of equal ones; NaN (not interpretable) does not count.

  None if there is none.
  """
  rmf = np.asarray(rmf, np.float64)
  return None if np.isnan(rmf).all() else int(np.nanargmax(rmf))


def paired_decline(
  route_a: np.ndarray,
  total_a: np.ndarray,
  route_b: np.ndarray,
  total_b: np.ndarray,
  *,
  seed: int = 0,
  resamples: int = 2000,
  confidence: float = 0.95,
) -> Estimate:
  """RMF at dose a minus RMF at dose b, over the same sequences, resampled together.

  Args:
    route_a, total_a, route_b, total_b: floats [C], sums of excess_route and excess_total in each
      sequence at the two doses.
    seed, resamples, confidence: of the bootstrap.

  Raises:
    ValueError: parts that are not [C] each, or fewer than two sequences.
  """
  parts = [np.asarray(part, np.float64) for part in (route_a, total_a, route_b, total_b)]
  shapes = [part.shape for part in parts]
  if parts[0].ndim != 1 or len(set(shapes)) > 1:
    raise ValueError(f"the four parts must be [C] of the same sequences, got {shapes}.")
  return cluster_bootstrap(
    lambda *drawn: ratio_of_sums(*drawn[:2]) - ratio_of_sums(*drawn[2:]),
    *parts,
    seed=seed,
    resamples=resamples,
    confidence=confidence,
  )


def interpolate(doses: np.ndarray, values: np.ndarray, at: float) -> float | None:
  """The value at a dose, on straight lines between measured points; None outside their range.

  Args:
    doses: floats [S], rising.
    values: floats [S].
    at: a dose.

  Raises:
    ValueError: points that are not [S] each, or doses that do not rise.
  """
  doses, values = np.asarray(doses, np.float64), np.asarray(values, np.float64)
  if doses.ndim != 1 or not doses.size or doses.shape != values.shape:
    raise ValueError(f"doses and values must be [S] each, got {doses.shape} and {values.shape}.")
  if (np.diff(doses) <= 0).any():
    raise ValueError(f"the doses {doses.tolist()} do not rise.")
  return float(np.interp(at, doses, values)) if doses[0] <= at <= doses[-1] else None
