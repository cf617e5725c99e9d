"""Detection: AUC from its definition over pairs, resamples one by one, probes on held-out folds."""

import math

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier

from moejax.analysis import detection
from moejax.analysis.bootstrap import Estimate


def pairwise_auc(scores, positive) -> float | None:
  """Pairs that the positive wins, ties half, over all pairs."""
  won = pairs = 0
  for score, is_positive in zip(scores, positive):
    for other, other_positive in zip(scores, positive):
      if is_positive and not other_positive:
        pairs += 1
        won += 1 if score > other else 0.5 if score == other else 0
  return won / pairs if pairs else None


def tokens(seed: int, size: int = 60):
  """Scores with many ties, harm that follows them a little, flips, clusters of unequal size."""
  rng = np.random.default_rng(seed)
  scores = rng.integers(8, size=size).astype(float)
  harmful = rng.random(size) < 0.2 + scores / 14
  return scores, harmful, rng.random(size) < 0.4, rng.integers(5, size=size)


@pytest.mark.parametrize("seed", range(3))
def test_auc_with_ties(seed):
  scores, positive, _, _ = tokens(seed)
  assert detection.auc(scores, positive) == pytest.approx(pairwise_auc(scores, positive), rel=1e-14)
  # Scores of float32 logits are compared as they are.
  assert detection.auc(scores.astype(np.float32), positive) == detection.auc(scores, positive)


def test_auc_of_one_class_is_none():
  assert detection.auc(np.arange(3.0), np.ones(3, bool)) is None
  assert detection.auc(np.arange(3.0), np.zeros(3, bool)) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_mixture_by_plain_loops(seed):
  scores, harmful, flipped, _ = tokens(seed)
  found = detection.benefit_mixture(scores, harmful, flipped)
  assert found.auc == pytest.approx(pairwise_auc(scores, harmful), rel=1e-14)
  rows = list(zip(scores, harmful, flipped))
  for changed, weight, value in (
    (False, found.unflipped_weight, found.unflipped_auc),
    (True, found.flipped_weight, found.flipped_auc),
  ):
    group = [row for row in rows if not row[1] and row[2] == changed]
    assert weight == len(group) / sum(not row[1] for row in rows)
    kept = group + [row for row in rows if row[1]]
    assert value == pytest.approx(pairwise_auc(*list(zip(*kept))[:2]), rel=1e-14)
  assert found.unflipped_auc != pytest.approx(found.flipped_auc, abs=1e-3)
  assert found.reconstruction == pytest.approx(found.auc, rel=1e-13)
  assert found.harm_given_flip == sum(harmful & flipped) / sum(flipped)
  assert found.harm_given_no_flip == sum(harmful & ~flipped) / sum(~flipped)


def test_the_mixture_of_a_whole_study_closes():
  rng = np.random.default_rng(0)
  flipped = rng.random(18_432) < 0.44
  scores = rng.standard_normal(18_432) + flipped
  found = detection.benefit_mixture(scores, rng.random(18_432) < 0.55, flipped)
  assert found.residual <= 1e-12
  assert found.residual == abs(found.auc - found.reconstruction)
  assert found.unflipped_auc > 0.6 and found.flipped_auc < 0.4


def test_a_mixture_with_empty_groups():
  scores, harmful, _, _ = tokens(0)
  found = detection.benefit_mixture(scores, harmful, np.zeros(60, bool))
  assert (found.unflipped_weight, found.unflipped_auc) == (1.0, found.auc)
  assert (found.flipped_weight, found.flipped_auc, found.harm_given_flip) == (0.0, None, None)
  assert found.reconstruction == found.auc and found.residual == 0
  found = detection.benefit_mixture(scores, np.ones(60, bool), harmful)
  assert found == detection.Mixture(None, None, None, None, None, None, None, 1.0, 1.0)
  found = detection.benefit_mixture(scores, np.zeros(60, bool), harmful)
  assert found.auc is found.reconstruction is found.residual is found.flipped_auc is None
  assert found.flipped_weight == pytest.approx(harmful.mean())


@pytest.mark.parametrize("seed", range(2))
def test_the_interval_pools_the_tokens_of_drawn_clusters(seed):
  scores, positive, _, clusters = tokens(seed)
  found = detection.cluster_auc_interval(
    scores, positive, clusters * 10, seed=seed, resamples=40, confidence=0.9
  )
  values = []
  for drawn in np.random.default_rng(seed).integers(5, size=(40, 5)):
    index = np.concatenate([np.flatnonzero(clusters == cluster) for cluster in drawn])
    values.append(pairwise_auc(scores[index], positive[index]))
  assert found.value == pytest.approx(detection.auc(scores, positive), rel=1e-14)
  assert (found.low, found.high) == pytest.approx(np.percentile(values, [5, 95]), rel=1e-13)
  other = detection.cluster_auc_interval(
    scores, positive, clusters, seed=seed + 9, resamples=40, confidence=0.9
  )
  assert other != found


def test_resamples_of_one_class_are_left_out():
  # Only draws of both clusters have an AUC, the same each time.
  scores, positive = np.array([0.0, 1.0, 1.0, 2.0]), np.array([False, False, True, True])
  found = detection.cluster_auc_interval(scores, positive, positive, resamples=50)
  assert found == Estimate(0.875, 0.875, 0.875)


def test_an_interval_of_one_class_is_none():
  ones = np.ones(4, bool)
  assert detection.cluster_auc_interval(np.arange(4.0), ones, np.arange(4)) is None
  assert detection.cluster_auc_interval(np.arange(4.0), ~ones, np.arange(4)) is None


def test_bad_scores_are_refused():
  flags, scores = np.array([True, False]), np.array([0.0, np.nan])
  for refused in (
    lambda: detection.auc(scores, flags),
    lambda: detection.benefit_mixture(scores, flags, flags),
    lambda: detection.cluster_auc_interval(scores, flags, flags),
  ):
    with pytest.raises(ValueError, match="scores hold NaN or infinite values"):
      refused()
  with pytest.raises(ValueError, match=r"positive must be bool \(2,\).*, got int64 \(2,\)"):
    detection.auc(np.zeros(2), np.array([0, 1]))
  with pytest.raises(ValueError, match=r"flipped must be bool \(2,\).*, got bool \(1,\)"):
    detection.benefit_mixture(np.zeros(2), flags, flags[:1])
  with pytest.raises(ValueError, match=r"scores must be \[n\] and not empty, got \(0,\)"):
    detection.auc(np.zeros(0), np.zeros(0, bool))
  with pytest.raises(ValueError, match=r"clusters must be \(2,\)"):
    detection.cluster_auc_interval(np.zeros(2), flags, np.zeros(3))
  with pytest.raises(ValueError, match=r"needs at least 2 clusters, got 1\.$"):
    detection.cluster_auc_interval(np.zeros(2), flags, np.zeros(2))


@pytest.mark.parametrize(
  "estimate, expected",
  [
    (Estimate(0.52, 0.49, 0.56), True),
    (Estimate(0.55, 0.5, 0.6), True),
    (Estimate(0.45, 0.4, 0.5), True),
    (Estimate(0.551, 0.45, 0.6), False),
    (Estimate(0.449, 0.4, 0.55), False),
    (Estimate(0.52, 0.51, 0.53), False),
    (Estimate(0.48, 0.47, 0.49), False),
  ],
)
def test_the_falsification_band(estimate, expected):
  assert detection.within_band(estimate) is expected


def test_a_band_may_be_narrower():
  assert not detection.within_band(Estimate(0.52, 0.49, 0.56), band=0.01)


def test_layer_features_by_plain_loops():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((3, 2, 5, 7)).astype(np.float32) * 3
  margins = rng.random((3, 2, 5)).astype(np.float32)
  found = detection.layer_features(margins, logits, top_k=2)
  assert found.shape == (2, 5, 15) and found.dtype == np.float64
  for b in range(2):
    for t in range(5):
      expected = []
      for layer in range(3):
        weights = [math.exp(z) for z in logits[layer, b, t].tolist()]
        p = sorted((weight / sum(weights) for weight in weights), reverse=True)
        entropy = -sum(chance * math.log(chance) for chance in p)
        expected += [margins[layer, b, t], entropy, p[0] - p[1], p[1] - p[2], p[0]]
      assert found[b, t].tolist() == pytest.approx(expected, rel=1e-12)


def test_layer_features_of_extreme_logits():
  found = detection.layer_features(np.zeros((1, 2)), np.array([[[2e3, 0, 0], [5.0, 5, 5]]]), 1)
  assert found[0].tolist() == [0, 0, 1, 1, 1]
  assert found[1].tolist() == pytest.approx([0, math.log(3), 0, 0, 1 / 3])


def test_bad_logits_are_refused():
  with pytest.raises(ValueError, match="top_k is 3, expected 1 to 2 of 3 experts"):
    detection.layer_features(np.zeros((1, 2)), np.zeros((1, 2, 3)), 3)
  with pytest.raises(ValueError, match=r"got \(2, 1\) and \(1, 2, 3\)"):
    detection.layer_features(np.zeros((2, 1)), np.zeros((1, 2, 3)), 1)


def test_history_stays_in_its_sequence():
  features = np.arange(1.0, 37).reshape(2, 6, 3)
  found = detection.temporal_features(features)
  for b in range(2):
    for n in range(6):
      expected = []
      for lag in range(5):
        expected += features[b, n - lag].tolist() if n >= lag else [0.0] * 3
      assert found[b, n].tolist() == expected
  assert detection.temporal_features(features, history=1).shape == (2, 6, 6)
  with pytest.raises(ValueError, match=r"features must be \[B, N, F\], got \(6, 3\)"):
    detection.temporal_features(features[0])


class Witness:
  """A classifier that writes down what it was fitted on and what it was asked."""

  def __init__(self, seen):
    self.seen = seen

  def fit(self, features, labels):
    self.seen.append([set(features[:, 0])])
    return self

  def predict_proba(self, features):
    self.seen[-1].append(set(features[:, 0]))
    return np.stack([1 - features[:, 1], features[:, 1]], axis=-1)


def test_sequences_never_mix_and_folds_are_ranked():
  rng = np.random.default_rng(0)
  groups, chance, seen = rng.integers(7, size=80), rng.integers(9, size=80) / 10, []
  features = np.stack([groups, chance], axis=-1)
  found = detection.cross_validated_scores(
    lambda: Witness(seen), features, rng.random(80) < 0.5, groups, folds=3
  )
  assert len(seen) == 3 and set.union(*(held_out for _, held_out in seen)) == set(range(7))
  for train, held_out in seen:
    assert train | held_out == set(range(7)) and not train & held_out
    fold = np.flatnonzero(np.isin(groups, list(held_out)))
    for i in fold:
      below = sum(chance[j] < chance[i] for j in fold)
      equal = sum(chance[j] == chance[i] for j in fold)
      assert found[i] == pytest.approx((below + (equal + 1) / 2) / (len(fold) + 1), rel=1e-14)


def test_the_rate_of_the_training_part_is_no_signal():
  # It is high where the held-out rate is low: as a score, it would put the AUC below one half.
  groups = np.repeat(np.arange(10), 20)
  labels = np.arange(200) % 20 < groups + 4
  found = detection.cross_validated_scores(
    lambda: DummyClassifier(strategy="prior"), np.zeros((200, 1)), labels, groups
  )
  assert detection.auc(found, labels) == 0.5


@pytest.mark.parametrize("name", ["logistic", "mlp", "boosting"])
def test_each_probe_finds_a_signal_and_repeats_itself(name):
  rng = np.random.default_rng(0)
  features = rng.standard_normal((400, 3)) * [1, 100, 0.01]
  labels = features[:, 2] + 0.003 * rng.standard_normal(400) > 0
  groups = np.arange(400) // 20
  first, second = (
    detection.cross_validated_scores(detection.PROBES[name], features, labels, groups, folds=2)
    for _ in range(2)
  )
  assert (first == second).all()
  assert detection.auc(first, labels) > 0.9


@pytest.mark.parametrize("name, apart", [("logistic", False), ("mlp", True), ("boosting", True)])
def test_what_a_line_cannot_part(name, apart):
  rng = np.random.default_rng(0)
  features = rng.standard_normal((800, 2))
  labels = (features**2).sum(axis=1) > 1.4
  found = detection.cross_validated_scores(
    detection.PROBES[name], features, labels, np.arange(800) // 20, folds=2
  )
  assert (detection.auc(found, labels) > 0.8) is apart


def test_bad_folds_are_refused():
  features, labels = np.zeros((8, 2)), np.arange(8) % 2 == 0
  groups = np.arange(8) // 2

  def refused(features=features, labels=labels, groups=groups, folds=4):
    detection.cross_validated_scores(detection.PROBES["logistic"], features, labels, groups, folds)

  with pytest.raises(ValueError, match="5 folds need at least 5 groups, got 4"):
    refused(folds=5)
  with pytest.raises(ValueError, match="the training part of fold 0 holds one class only"):
    refused(labels=groups == 3)
  with pytest.raises(ValueError, match=r"bool labels \[n\].*, got \(8, 2\), int64 \(8,\)"):
    refused(labels=groups)
  with pytest.raises(ValueError, match=r"and \(7,\)\.$"):
    refused(groups=groups[:7])
  with pytest.raises(ValueError, match="features hold NaN or infinite values"):
    refused(features=np.full((8, 2), np.inf))
