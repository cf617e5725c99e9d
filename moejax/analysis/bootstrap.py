"""Intervals by resampling whole clusters (sequences), since tokens of one are not independent."""

from collections.abc import Callable
import dataclasses

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number and its percentile interval."""

  value: float
  low: float
  high: float

  @property
  def excludes_zero(self) -> bool:
    return self.low > 0 or self.high < 0

  def __str__(self) -> str:
    return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def cluster_bootstrap(
  statistic: Callable[..., np.ndarray],
  *clusters: np.ndarray,
  seed: int = 0,
  resamples: int = 2000,
  confidence: float = 0.95,
) -> Estimate:
  """A statistic of clusters and its interval.

  Args:
    statistic: function of as many arrays as there are, which reduces their last axis.
    clusters: [C] each, one value per cluster, resampled together.
    seed, resamples, confidence: of the bootstrap.

  Raises:
    ValueError: fewer than two clusters.
  """
  if len(clusters[0]) < 2:
    raise ValueError(f"a cluster bootstrap needs at least 2 clusters, got {len(clusters[0])}.")
  result = stats.bootstrap(
    clusters,
    lambda *parts, axis: statistic(*parts),
    paired=True,
    vectorized=True,
    method="percentile",
    n_resamples=resamples,
    confidence_level=confidence,
    rng=np.random.default_rng(seed),
  )
  low, high = result.confidence_interval
  return Estimate(float(statistic(*clusters)), float(low), float(high))


def mean(values: np.ndarray) -> np.ndarray:
  """Over the last axis: for `cluster_bootstrap` of clusters of equal size."""
  return values.mean(axis=-1)


def ratio_of_sums(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
  """Σ numerator / Σ denominator over the last axis."""
  return numerator.sum(axis=-1) / denominator.sum(axis=-1)
