"""Disturbance gain: plain loops over tokens, disturbances whose growth is known, exact zeros."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from moejax.analysis import gain

S, B, T, D = 5, 3, 11, 7


def states(seed: int = 0):
  """A clean and a disturbed run; some tokens are not disturbed at some states."""
  rng = np.random.default_rng(seed)
  clean = rng.standard_normal((S, B, T, D)) * np.arange(1, S + 1)[:, None, None, None]
  delta = rng.standard_normal((S, B, T, D)) * np.exp(rng.standard_normal((S, B, T, 1)))
  delta[0, 0, :2] = delta[2, 1, 5] = delta[4, 2, 0] = 0
  return clean, clean + delta


def norm(vector) -> float:
  return math.sqrt(sum(value**2 for value in vector.tolist()))


def test_gains_by_plain_loops():
  clean, disturbed = states()
  found = gain.disturbance_gain(clean, disturbed)
  for step in range(S - 1):
    raw, relative = [], []
    for b in range(B):
      for t in range(T):
        before, after = (norm(disturbed[s, b, t] - clean[s, b, t]) for s in (step, step + 1))
        if before > 0:
          raw.append(after / before)
          relative.append(raw[-1] * norm(clean[step, b, t]) / norm(clean[step + 1, b, t]))
    assert found.gains[step] == pytest.approx(np.median(raw), rel=1e-12)
    assert found.relative_gains[step] == pytest.approx(np.median(relative), rel=1e-12)
    assert found.excluded[step] == B * T - len(raw)
    assert found.small_gains[step] == sum(ratio < 1 for ratio in raw) / len(raw)
  assert found.excluded.tolist() == [2, 0, 1, 0]
  assert found.product == pytest.approx(math.prod(found.gains.tolist()))
  assert found.relative_product == pytest.approx(math.prod(found.relative_gains.tolist()))
  assert 0 < found.soundness < 1e-12


def test_growth_is_cross_and_own():
  clean, disturbed = states()
  found = gain.disturbance_gain(clean, disturbed)
  delta = disturbed - clean
  square = (delta**2).sum(axis=-1).mean(axis=(1, 2))
  assert found.cross + found.own == pytest.approx(np.diff(square), rel=1e-10)
  own = [((delta[s + 1] - delta[s]) ** 2).sum() / (B * T) for s in range(S - 1)]
  assert found.own == pytest.approx(np.array(own), rel=1e-12)
  assert found.cross_share == pytest.approx(1 - found.own / np.diff(square), rel=1e-9)
  accumulated = 1 - sum(own) / (square[-1] - square[0])
  assert found.accumulated_cross_share == pytest.approx(accumulated, rel=1e-9)


def test_amplification_and_accumulation_are_told_apart():
  clean = np.ones((3, 1, 4, 3)) * np.array([1.0, 4.0, 16.0])[:, None, None, None]
  first = np.zeros((1, 4, 3))
  first[..., 0] = 1.0
  amplified = gain.disturbance_gain(clean, clean + np.stack([first, 2 * first, 4 * first]))
  # δx to 2δx: 2⟨δx, δx⟩ of the growth by 3⟨δx, δx⟩.
  assert amplified.gains.tolist() == [2, 2] and amplified.product == 4
  assert amplified.relative_gains.tolist() == [0.5, 0.5] and amplified.relative_product == 0.25
  assert amplified.cross.tolist() == [2, 8] and amplified.own.tolist() == [1, 4]
  assert amplified.cross_share.tolist() == pytest.approx([2 / 3, 2 / 3])
  assert amplified.accumulated_cross_share == pytest.approx(2 / 3)
  # An increment at a right angle to all that is there.
  second, third = np.roll(first, 1, axis=-1), np.roll(first, 2, axis=-1)
  added = np.stack([first, first + second, first + second + third])
  accumulated = gain.disturbance_gain(clean, clean + added)
  assert accumulated.cross.tolist() == [0, 0] and accumulated.own.tolist() == [1, 1]
  assert accumulated.accumulated_cross_share == 0
  assert accumulated.gains.tolist() == pytest.approx([math.sqrt(2), math.sqrt(1.5)])


def test_growth_of_zero_has_no_share():
  clean = np.ones((2, 1, 4, 2))
  found = gain.disturbance_gain(clean, clean + 1)
  assert math.isnan(found.cross_share[0]) and math.isnan(found.accumulated_cross_share)
  assert found.small_gains.tolist() == [0]


def test_persistence_is_along_each_sequence():
  clean, disturbed = states()
  found = gain.disturbance_gain(clean, disturbed)
  for s in range(S):
    expected = []
    for b in range(B):
      size = [norm(vector) for vector in disturbed[s, b] - clean[s, b]]
      pairs = [(x, y) for x, y in itertools.pairwise(size) if x > 0 and y > 0]
      expected.append(stats.pearsonr(*np.log(pairs).T).statistic)
    assert found.persistence[s] == pytest.approx(np.mean(expected), rel=1e-9)
  assert found.mean_persistence == pytest.approx(found.persistence.mean())


def test_persistence_ignores_the_level_of_a_sequence():
  rng = np.random.default_rng(0)
  noise = rng.standard_normal(400)
  log_size = np.zeros(400)
  for t in range(1, 400):
    log_size[t] = 0.6 * log_size[t - 1] + noise[t]
  clean = np.ones((2, 2, 400, 1))
  delta = np.exp(np.stack([log_size, log_size + 20]))[None, ..., None] * np.ones((2, 1, 1, 1))
  found = gain.disturbance_gain(clean, clean + delta)
  alone = gain.disturbance_gain(clean[:, :1], (clean + delta)[:, :1])
  assert found.mean_persistence == pytest.approx(alone.mean_persistence, rel=1e-6)
  assert 0.5 < found.mean_persistence < 0.7


def test_a_constant_size_has_no_persistence():
  clean = np.ones((2, 2, 5, 1))
  found = gain.disturbance_gain(clean, clean + 0.1)
  assert np.isnan(found.persistence).all() and math.isnan(found.mean_persistence)
  # One state with spread is enough for the mean; two pairs in a sequence are not.
  delta = np.full((2, 2, 5, 1), 0.5)
  delta[1, 0, :, 0] = [1, 2, 4, 2, 1]
  found = gain.disturbance_gain(clean, clean + delta)
  assert found.mean_persistence == found.persistence[1] and np.isnan(found.persistence[0])
  found = gain.disturbance_gain(clean[:, :, :3], (clean + delta)[:, :, :3])
  assert np.isnan(found.persistence).all()


def test_soundness_leaves_out_tokens_that_are_not_disturbed_throughout():
  clean = np.ones((3, 1, 2, 1))
  delta = np.array([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0]])[:, None, :, None]
  found = gain.disturbance_gain(clean, clean + delta)
  assert math.isnan(found.soundness)
  assert found.excluded.tolist() == [1, 0] and found.gains.tolist() == [2.0, 0.5]
  assert found.small_gains.tolist() == [0.0, 0.5]


def test_narrow_states_are_subtracted_in_float64():
  clean, disturbed = (part.astype(ml_dtypes.bfloat16) for part in states())
  narrow = gain.disturbance_gain(clean, disturbed)
  wide = gain.disturbance_gain(clean.astype(np.float64), disturbed.astype(np.float64))
  assert (narrow.gains == wide.gains).all() and narrow.gains.dtype == np.float64
  assert (narrow.own == wide.own).all() and narrow.soundness == wide.soundness


def test_bad_states_are_refused():
  clean, disturbed = states()
  with pytest.raises(ValueError, match="no token is disturbed at state 0"):
    gain.disturbance_gain(clean, clean)
  late = np.concatenate([disturbed[:2], clean[2:3], disturbed[3:]])
  with pytest.raises(ValueError, match="no token is disturbed at state 2"):
    gain.disturbance_gain(clean, late)
  with pytest.raises(ValueError, match=r"two states or more, got \(1, 3, 11, 7\)"):
    gain.disturbance_gain(clean[:1], disturbed[:1])
  with pytest.raises(ValueError, match=r"got \(5, 3, 11, 7\) and \(4, 3, 11, 7\)"):
    gain.disturbance_gain(clean, disturbed[1:])
  clean[1, 2, 3] = 0
  with pytest.raises(ValueError, match="clean state 1 has norm 0 at a token"):
    gain.disturbance_gain(clean, disturbed)
  disturbed[0, 0, 0, 0] = np.nan
  with pytest.raises(ValueError, match="state 0 is NaN or infinite"):
    gain.disturbance_gain(clean, disturbed)
