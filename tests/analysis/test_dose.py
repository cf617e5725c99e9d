"""Doses: hand-made curves, the decline over resamples drawn one by one."""

import numpy as np
import pytest

from moejax.analysis import dose
from moejax.analysis.bootstrap import Estimate


def test_the_ends_of_the_band_are_matched():
  doses = np.array([0.79, 0.8, 1.0, 1.2, 1.21])
  assert dose.matched(doses).tolist() == [False, True, True, True, False]
  narrow = dose.matched(np.array([0.89, 0.9, 1.1, 1.11]), band=0.1)
  assert narrow.tolist() == [False, True, True, False]


def test_the_crossover_is_the_first_step_of_a_larger_factor():
  assert dose.crossover([1, 2, 4, 9.4], [1, 3, 7, 14.2]) == 2
  assert dose.crossover([1, 2, 9, 40], [1, 3, 6, 7]) == 1
  # By more, but not by a larger factor.
  assert dose.crossover([10, 12], [1, 2]) is None
  assert dose.crossover([1, 2], [2, 4]) is None
  assert dose.crossover([1], [1]) is None


def test_a_step_without_a_factor_is_passed_over():
  assert dose.crossover([1, 5, 20], [-1, 2, 4]) == 1
  assert dose.crossover([0, 5, 20], [1, 2, 4]) == 1
  assert dose.crossover([1, 5], [0, 2]) is None


def test_the_peak():
  assert dose.peak([0.31, 0.58, 0.54]) == 1
  assert dose.peak([np.nan, 0.2, 0.3, 0.3]) == 2
  assert dose.peak([np.nan, np.nan]) is None


def test_the_decline_resamples_sequences_together():
  rng = np.random.default_rng(0)
  total_a, total_b = 1 + rng.random((2, 12))
  route_a, route_b = 0.6 * total_a + 0.1 * rng.random(12), 0.5 * total_b
  found = dose.paired_decline(
    route_a, total_a, route_b, total_b, seed=5, resamples=200, confidence=0.9
  )
  declines = []
  for index in np.random.default_rng(5).integers(12, size=(200, 12)):
    at_a = sum(route_a[i] for i in index) / sum(total_a[i] for i in index)
    at_b = sum(route_b[i] for i in index) / sum(total_b[i] for i in index)
    declines.append(at_a - at_b)
  assert found.value == pytest.approx(route_a.sum() / total_a.sum() - 0.5, rel=1e-12)
  assert (found.low, found.high) == pytest.approx(np.percentile(declines, [5, 95]), rel=1e-9)
  assert found.excludes_zero and found.value > 0
  back = dose.paired_decline(
    route_b, total_b, route_a, total_a, seed=5, resamples=200, confidence=0.9
  )
  assert (back.value, back.low, back.high) == pytest.approx((-found.value, -found.high, -found.low))


def test_one_curve_against_itself_does_not_decline():
  rng = np.random.default_rng(1)
  route, total = rng.random((2, 9))
  assert dose.paired_decline(route, total, route, total) == Estimate(0.0, 0.0, 0.0)


def test_interpolation_is_on_straight_lines():
  doses, values = np.array([0.5, 1.0, 3.0]), np.array([0.1, 0.3, 0.2])
  assert dose.interpolate(doses, values, 0.75) == pytest.approx(0.2)
  assert dose.interpolate(doses, values, 2.5) == pytest.approx(0.225)
  assert [dose.interpolate(doses, values, at) for at in doses] == values.tolist()
  assert dose.interpolate(doses, values, 0.49) is None
  assert dose.interpolate(doses, values, 3.01) is None


def test_bad_curves_are_refused():
  with pytest.raises(ValueError, match=r"both channels must be \[S\], got \(2,\) and \(3,\)"):
    dose.crossover(np.ones(2), np.ones(3))
  with pytest.raises(ValueError, match=r"the four parts must be \[C\] of the same sequences"):
    dose.paired_decline(np.ones(2), np.ones(2), np.ones(3), np.ones(3))
  with pytest.raises(ValueError, match=r"got \(2,\) and \(3,\)"):
    dose.interpolate(np.ones(2), np.ones(3), 1.0)
  with pytest.raises(ValueError, match=r"the doses \[1\.0, 1\.0\] do not rise"):
    dose.interpolate(np.ones(2), np.ones(2), 1.0)
  with pytest.raises(ValueError, match=r"needs at least 2 clusters, got 1"):
    dose.paired_decline(*np.ones((4, 1)))
