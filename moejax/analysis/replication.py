"""How far a number moves between fresh processes, and how many sequences an effect needs."""

import dataclasses
import math
import statistics

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Replication:
  """A number measured in several processes, repeated within each; all but `icc` in its unit.

  Attributes:
    mean: of all values.
    between_sd: standard deviation of the process means (n - 1).
    low, high: smallest and largest process mean.
    within_sd: standard deviation of repeats, pooled over processes (n - 1 in each).
    icc: ICC(1), one-way random effects: the share of variance that lies between processes. None
      where it is undefined, both variances being zero; below 0 where repeats differ more than
      processes do.
    repeat_gap: largest difference between two repeats of one process; 0 if repeats are bitwise.
  """

  mean: float
  between_sd: float
  low: float
  high: float
  within_sd: float
  icc: float | None
  repeat_gap: float


def replication(values: np.ndarray) -> Replication:
  """Spread between and within processes.

  Equal values have a variance of exactly zero, since means are taken of exact sums.

  Args:
    values: floats [P, R], R repeats within each of P processes.

  Raises:
    ValueError: fewer than two processes or repeats, or a value that is NaN or infinite.
  """
  values = np.asarray(values, np.float64)
  if values.ndim != 2 or min(values.shape) < 2:
    raise ValueError(
      f"values must be [P, R] of at least 2 processes and 2 repeats, got {values.shape}."
    )
  if not np.isfinite(values).all():
    raise ValueError("the repeats hold NaN or infinite values, expected finite ones.")
  means = [statistics.mean(row) for row in values.tolist()]
  within = statistics.mean(statistics.variance(row) for row in values.tolist())
  between = statistics.variance(means)

  repeats = values.shape[1]
  variance = repeats * between + (repeats - 1) * within  # MS between + (R - 1) MS within
  return Replication(
    mean=statistics.mean(means),
    between_sd=math.sqrt(between),
    low=min(means),
    high=max(means),
    within_sd=math.sqrt(within),
    icc=(repeats * between - within) / variance if variance else None,
    repeat_gap=float(np.ptp(values, axis=1).max()),
  )


def sequences_needed(
  per_sequence: np.ndarray, *, confidence: float = 0.95, power: float = 0.8
) -> int | None:
  """How many sequences the interval of the mean needs to exclude zero with the given power.

  The normal approximation, ((z(1 - α/2) + z(power)) · SD / |mean|)² rounded up, at least 2; None
  where the mean is zero, which no number of sequences tells from zero.

  Args:
    per_sequence: floats [C], the effect in each sequence of a pilot.
    confidence: of the two-sided interval.
    power: chance that it excludes zero.

  Raises:
    ValueError: fewer than two sequences, an effect that is NaN or infinite, or a confidence or
      power outside (0, 1).
  """
  per_sequence = np.asarray(per_sequence, np.float64)
  if per_sequence.ndim != 1 or len(per_sequence) < 2:
    raise ValueError(f"effects must be [C] of at least 2 sequences, got {per_sequence.shape}.")
  if not np.isfinite(per_sequence).all():
    raise ValueError("effects hold NaN or infinite values, expected finite ones.")
  for name, chance in (("confidence", confidence), ("power", power)):
    if not 0 < chance < 1:
      raise ValueError(f"{name} is {chance}, expected a number between 0 and 1.")
  mean = per_sequence.mean()
  if mean == 0:
    return None
  z = stats.norm.ppf((1 + confidence) / 2) + stats.norm.ppf(power)
  return max(2, math.ceil((z * per_sequence.std(ddof=1) / mean) ** 2))
