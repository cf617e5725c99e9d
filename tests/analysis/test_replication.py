"""Replication: ICC from SciPy's F and a printed table, exact zeros, the power of a drawn sample."""

import math

import numpy as np
import pytest
from scipy import stats

from moejax.analysis import replication

# Shrout and Fleiss (1979), table 2: six targets, four judges; ICC(1, 1) = 0.17.
JUDGES = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]


def test_the_printed_icc():
  found = replication.replication(np.array(JUDGES))
  assert round(found.icc, 2) == 0.17
  assert (found.low, found.high, found.repeat_gap) == (3.0, 7.5, 7.0)
  assert found.mean == pytest.approx(np.mean(JUDGES), rel=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_icc_from_the_f_of_one_way_anova(seed):
  rng = np.random.default_rng(seed)
  values = 0.31 + 0.02 * rng.standard_normal((5, 1)) + 0.01 * rng.standard_normal((5, 3))
  found = replication.replication(values)
  ratio = stats.f_oneway(*values).statistic
  assert found.icc == pytest.approx((ratio - 1) / (ratio + 2), rel=1e-9)
  means = values.mean(axis=1)
  assert found.between_sd == pytest.approx(means.std(ddof=1), rel=1e-12)
  assert (found.low, found.high) == pytest.approx((means.min(), means.max()), rel=1e-15)
  squares = sum((value - mean) ** 2 for row, mean in zip(values, means) for value in row)
  assert found.within_sd == pytest.approx(math.sqrt(squares / 10), rel=1e-12)
  gaps = [abs(a - b) for row in values for a in row for b in row]
  assert found.repeat_gap == max(gaps)


def test_repeats_that_differ_more_than_processes():
  found = replication.replication(np.array([[0.0, 1.0], [1.0, 0.0]]))
  assert (found.between_sd, found.icc) == (0.0, -1.0)


@pytest.mark.parametrize("repeats", [2, 3, 10])
def test_bitwise_repeats_have_no_variance_at_all(repeats):
  # The mean of three floats 0.1 is not 0.1 in floating point.
  values = np.repeat([[0.1], [0.3], [0.7], [1 / 3], [0.9]], repeats, axis=1)
  found = replication.replication(values)
  assert (found.within_sd, found.repeat_gap, found.icc) == (0.0, 0.0, 1.0)
  found = replication.replication(np.full((5, repeats), 0.1))
  assert found == replication.Replication(0.1, 0.0, 0.1, 0.1, 0.0, None, 0.0)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1)])
def test_one_process_or_repeat_is_refused(shape):
  with pytest.raises(ValueError, match=r"at least 2 processes and 2 repeats, got \("):
    replication.replication(np.zeros(shape))


def test_the_number_of_the_textbook():
  # Mean half a standard deviation: (1.959964 + 0.841621)² · 4 = 31.4.
  effect = np.array([-1.0, 1.0]) / math.sqrt(2) + 0.5
  assert replication.sequences_needed(effect) == 32
  assert replication.sequences_needed(-effect) == 32
  assert replication.sequences_needed(10 * effect) == 32
  # (1.644854 + 1.281552)² · 4 = 34.3.
  assert replication.sequences_needed(effect, confidence=0.9, power=0.9) == 35


def test_the_power_is_reached_and_not_by_much():
  rng = np.random.default_rng(0)
  pilot = rng.standard_normal(100_000) + 0.25
  needed = replication.sequences_needed(pilot)
  for size, low, high in ((needed, 0.79, 0.83), (needed // 2, 0.45, 0.55)):
    drawn = rng.standard_normal((10_000, size)) + 0.25
    excluded = drawn.mean(axis=1) > 1.959964 / math.sqrt(size)
    assert low < excluded.mean() < high


def test_the_ends_of_what_can_be_needed():
  assert replication.sequences_needed(np.array([1.0, -1.0])) is None
  assert replication.sequences_needed(np.full(3, 0.1)) == 2


def test_bad_input_is_refused():
  with pytest.raises(ValueError, match=r"at least 2 sequences, got \(1,\)"):
    replication.sequences_needed(np.ones(1))
  with pytest.raises(ValueError, match=r"confidence is 95, expected a number between 0 and 1"):
    replication.sequences_needed(np.ones(2), confidence=95)
  with pytest.raises(ValueError, match=r"power is 1, expected"):
    replication.sequences_needed(np.ones(2), power=1)
  with pytest.raises(ValueError, match="effects hold NaN"):
    replication.sequences_needed(np.array([1, np.nan]))
  with pytest.raises(ValueError, match="the repeats hold NaN"):
    replication.replication(np.array([[1, np.nan], [1, 1]]))
