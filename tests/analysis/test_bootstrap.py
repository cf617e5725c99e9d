"""Cluster bootstrap: SciPy's interval, whole clusters, ratios of sums."""

import numpy as np
import pytest

from moejax.analysis.bootstrap import cluster_bootstrap, Estimate, mean, ratio_of_sums


def by_hand(statistic, parts, seed, resamples):
  """Resamples with SciPy's own draws of indices, one at a time."""
  rng, n = np.random.default_rng(seed), len(parts[0])
  index = rng.integers(0, n, (resamples, n))
  values = [float(statistic(*(part[row] for part in parts))) for row in index]
  return np.percentile(values, [2.5, 97.5])


def test_the_interval_of_a_mean():
  values = np.random.default_rng(0).standard_normal(40) + 0.5
  found = cluster_bootstrap(mean, values, seed=3, resamples=500)
  assert found.value == pytest.approx(values.mean(), rel=1e-15)
  low, high = by_hand(mean, [values], 3, 500)
  assert (found.low, found.high) == pytest.approx((low, high), abs=0.05)
  assert found == cluster_bootstrap(mean, values, seed=3, resamples=500)
  assert found != cluster_bootstrap(mean, values, seed=4, resamples=500)


def test_a_ratio_of_sums_is_no_mean_of_ratios():
  top, bottom = np.array([1.0, 9.0, 2.0]), np.array([1.0, 100.0, 4.0])
  found = cluster_bootstrap(ratio_of_sums, top, bottom)
  assert found.value == pytest.approx(12 / 105)
  assert found.value != pytest.approx((top / bottom).mean())
  # Clusters are drawn whole: a ratio that is one everywhere has no spread.
  assert cluster_bootstrap(ratio_of_sums, bottom, bottom) == Estimate(1.0, 1.0, 1.0)


def test_zero():
  assert Estimate(1, 0.5, 2).excludes_zero and Estimate(-1, -2, -0.5).excludes_zero
  assert not Estimate(1, 0, 2).excludes_zero and not Estimate(1, -1, 2).excludes_zero


def test_one_cluster_is_not_enough():
  with pytest.raises(ValueError, match=r"needs at least 2 clusters, got 1\.$"):
    cluster_bootstrap(mean, np.ones(1))
