"""Can a flip, or its harm, be told from what the router shows? AUCs, their intervals, probes.

Scores rise with the event they are to detect. To score a margin, pass its negative.
"""

from collections.abc import Callable
import dataclasses
import math

import numpy as np
from scipy import special, stats
from sklearn import ensemble, linear_model, metrics, model_selection, neural_network
from sklearn.base import BaseEstimator
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from moejax.analysis.bootstrap import Estimate


@dataclasses.dataclass(frozen=True)
class Mixture:
  """The benefit AUC as a mixture over its two groups of negatives (route study, section 4).

  A number is None where a class or group it needs has no tokens.

  Attributes:
    auc: of harmful tokens against all others.
    unflipped_weight, flipped_weight: shares of the negatives whose set did not and did change.
    unflipped_auc, flipped_auc: of harmful tokens against those negatives alone.
    reconstruction: Σ weight × AUC of the two groups.
    residual: |auc - reconstruction|, rounding only.
    harm_given_flip, harm_given_no_flip: shares of harmful tokens among flipped and unflipped ones.
  """

  auc: float | None
  unflipped_weight: float | None
  unflipped_auc: float | None
  flipped_weight: float | None
  flipped_auc: float | None
  reconstruction: float | None
  residual: float | None
  harm_given_flip: float | None
  harm_given_no_flip: float | None


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
  """The chance that a positive scores higher than a negative, ties half; None with one class only.

  Args:
    scores: floats [n].
    positive: bool [n].

  Raises:
    ValueError: another shape or dtype, or a score that is NaN or infinite.
  """
  scores, positive = _check(scores, positive=positive)
  if positive.all() or not positive.any():
    return None
  return float(metrics.roc_auc_score(positive, scores))


def benefit_mixture(scores: np.ndarray, harmful: np.ndarray, flipped: np.ndarray) -> Mixture:
  """AUC of harmful tokens over all tokens, taken apart by whether the negatives flipped.

  Args:
    scores: floats [n].
    harmful: bool [n], harm > 0.
    flipped: bool [n], the scoring layer's set changed.

  Raises:
    ValueError: as `auc`.
  """
  scores, harmful, flipped = _check(scores, harmful=harmful, flipped=flipped)

  def auc_against(group):
    return auc(scores[harmful | group], harmful[harmful | group])

  def share(part, whole):
    return float(part[whole].mean()) if whole.any() else None

  whole = auc(scores, harmful)
  weights = share(~flipped, ~harmful), share(flipped, ~harmful)
  aucs = auc_against(~harmful & ~flipped), auc_against(~harmful & flipped)
  reconstruction = residual = None
  if whole is not None:
    parts = [weight * part for weight, part in zip(weights, aucs) if part is not None]
    reconstruction = math.fsum(parts)
    residual = abs(whole - reconstruction)
  return Mixture(
    auc=whole,
    unflipped_weight=weights[0],
    unflipped_auc=aucs[0],
    flipped_weight=weights[1],
    flipped_auc=aucs[1],
    reconstruction=reconstruction,
    residual=residual,
    harm_given_flip=share(harmful, flipped),
    harm_given_no_flip=share(harmful, ~flipped),
  )


def cluster_auc_interval(
  scores: np.ndarray,
  positive: np.ndarray,
  clusters: np.ndarray,
  *,
  seed: int = 0,
  resamples: int = 2000,
  confidence: float = 0.95,
) -> Estimate | None:
  """The AUC of pooled tokens and its percentile interval over resampled clusters (sequences).

  Draws the clusters that `cluster_bootstrap` draws from the same seed. A resample that holds one
  class only has no AUC and is left out. None where all tokens are of one class.

  Args:
    scores, positive: as `auc`.
    clusters: [n], the cluster of each token.
    seed, resamples, confidence: of the bootstrap.

  Raises:
    ValueError: as `auc`, or fewer than two clusters.
  """
  scores, positive = _check(scores, positive=positive)
  clusters = np.asarray(clusters)
  if clusters.shape != scores.shape:
    raise ValueError(f"clusters must be {scores.shape} as the scores, got {clusters.shape}.")
  names, member = np.unique(clusters, return_inverse=True)
  size = len(names)
  if size < 2:
    raise ValueError(f"a cluster bootstrap needs at least 2 clusters, got {size}.")
  if positive.all() or not positive.any():
    return None
  wins = _wins(scores, positive, member, size)
  positives = np.bincount(member[positive], minlength=size)
  negatives = np.bincount(member[~positive], minlength=size)

  drawn = np.random.default_rng(seed).integers(size, size=(resamples, size))
  row = np.arange(resamples)[:, None] * size
  counts = np.bincount((row + drawn).ravel(), minlength=resamples * size).reshape(drawn.shape)
  pairs = (counts @ positives) * (counts @ negatives)
  won = ((counts @ wins) * counts).sum(axis=1)
  aucs = won[pairs > 0] / pairs[pairs > 0]
  low, high = np.quantile(aucs, [(1 - confidence) / 2, (1 + confidence) / 2])
  value = wins.sum() / (positives.sum() * negatives.sum())
  return Estimate(float(value), float(low), float(high))


def within_band(estimate: Estimate, band: float = 0.05) -> bool:
  """Whether an AUC is at chance by the rule declared beforehand: near 0.5, and covering it."""
  return 0.5 - band <= estimate.value <= 0.5 + band and estimate.low <= 0.5 <= estimate.high


def layer_features(margins: np.ndarray, logits: np.ndarray, top_k: int) -> np.ndarray:
  """What the routers of all layers show of a token, for the cross-layer probe.

  Args:
    margins: floats [L, ...], weakest selected minus strongest unselected score.
    logits: floats [L, ..., E], E at least 2.
    top_k: how many experts are selected, 1 .. E - 1.

  Returns:
    float64 [..., L * 5], layer by layer: margin; entropy of softmax(logits) over all experts in
    nats; p(1) - p(2); p(k) - p(k + 1); p(1), with p the softmax by falling size.

  Raises:
    ValueError: shapes that do not fit, or `top_k` out of range.
  """
  margins, logits = np.asarray(margins, np.float64), np.asarray(logits, np.float64)
  if logits.ndim < 2 or margins.shape != logits.shape[:-1]:
    raise ValueError(
      f"margins must be [L, ...] and logits [L, ..., E], got {margins.shape} and {logits.shape}."
    )
  num_experts = logits.shape[-1]
  if not 1 <= top_k < num_experts:
    raise ValueError(f"top_k is {top_k}, expected 1 to {num_experts - 1} of {num_experts} experts.")
  chance = special.softmax(logits, axis=-1)
  entropy = special.entr(chance).sum(axis=-1)
  falling = -np.sort(-chance, axis=-1)
  gate_gap = falling[..., 0] - falling[..., 1]
  top_k_gap = falling[..., top_k - 1] - falling[..., top_k]
  features = np.stack([margins, entropy, gate_gap, top_k_gap, falling[..., 0]], axis=-1)
  return np.moveaxis(features, 0, -2).reshape(*features.shape[1:-1], -1)


def temporal_features(features: np.ndarray, history: int = 4) -> np.ndarray:
  """Features of a token followed by those of the tokens before it in its sequence, nearest first.

  Args:
    features: [B, N, F].
    history: how many tokens back.

  Returns:
    [B, N, F * (history + 1)], zeros for tokens before the start.

  Raises:
    ValueError: features of another rank.
  """
  if np.ndim(features) != 3:
    raise ValueError(f"features must be [B, N, F], got {np.shape(features)}.")
  length = features.shape[1]
  padded = np.pad(features, ((0, 0), (history, 0), (0, 0)))
  starts = range(history, -1, -1)
  return np.concatenate([padded[:, start : start + length] for start in starts], axis=-1)


def cross_validated_scores(
  make_estimator: Callable[[], BaseEstimator],
  features: np.ndarray,
  labels: np.ndarray,
  groups: np.ndarray,
  folds: int = 5,
) -> np.ndarray:
  """How a probe ranks tokens of sequences that it was not fitted on (GroupKFold by sequence).

  Args:
    make_estimator: makes a classifier with `predict_proba`; see `PROBES`.
    features: floats [n, F].
    labels: bool [n].
    groups: integers [n], the sequence of each token.
    folds: how many parts the sequences are held out in.

  Returns:
    float64 [n] within (0, 1): midranks of the predicted probability within the fold. Not the
    probability itself, since that follows the rate of the training part, which is high where the
    held-out rate is low: pooled over folds, it puts the AUC of pure noise below 0.5.

  Raises:
    ValueError: shapes or dtypes that do not fit, features that are NaN or infinite, fewer groups
      than folds, or a fold whose training part holds one class only.
  """
  features, labels, groups = np.asarray(features), np.asarray(labels), np.asarray(groups)
  if labels.dtype != bool or features.ndim != 2 or not len(features) == len(labels) == len(groups):
    raise ValueError(
      "a probe needs features [n, F], bool labels [n] and groups [n], got "
      f"{features.shape}, {labels.dtype} {labels.shape} and {groups.shape}."
    )
  if not np.isfinite(features).all():
    raise ValueError("features hold NaN or infinite values, expected finite ones.")
  num_groups = len(np.unique(groups))
  if num_groups < folds:
    raise ValueError(f"{folds} folds need at least {folds} groups, got {num_groups}.")
  scores = np.empty(len(labels))
  splits = model_selection.GroupKFold(folds).split(features, labels, groups)
  for fold, (train, held_out) in enumerate(splits):
    if len(np.unique(labels[train])) < 2:
      raise ValueError(f"the training part of fold {fold} holds one class only, expected both.")
    probe = make_estimator().fit(features[train], labels[train])
    chance = probe.predict_proba(features[held_out])[:, 1]
    scores[held_out] = stats.rankdata(chance) / (len(held_out) + 1)
  return scores


def logistic() -> BaseEstimator:
  """Logistic regression on standardised features."""
  return make_pipeline(StandardScaler(), linear_model.LogisticRegression(max_iter=1000))


def mlp() -> BaseEstimator:
  """One hidden layer of 16 units on standardised features, stopped early."""
  # At the defaults, 0.001 and 10, it stops on a few hundred tokens before it has learned anything.
  network = neural_network.MLPClassifier(
    (16,),
    learning_rate_init=0.01,
    early_stopping=True,
    n_iter_no_change=20,
    max_iter=500,
    random_state=0,
  )
  return make_pipeline(StandardScaler(), network)


def boosting() -> BaseEstimator:
  """Fifty small gradient-boosted trees."""
  return ensemble.HistGradientBoostingClassifier(
    max_iter=50, max_leaf_nodes=15, early_stopping=False, random_state=0
  )


PROBES = {"logistic": logistic, "mlp": mlp, "boosting": boosting}


def _wins(scores, positive, member, size) -> np.ndarray:
  """float64 [C, C]: pairs of a positive of c and a negative of d that the positive wins, ties half.

  Cluster c drawn w_c times makes w_c · w_d of each pair, so Σ w_c w_d wins[c, d] over the number of
  pairs is the AUC of a resample. Whole and half numbers: exact.
  """
  own_scores, owner = scores[positive], member[positive]
  wins = np.empty((size, size))
  for cluster in range(size):
    negatives = np.sort(scores[~positive & (member == cluster)])
    below = np.searchsorted(negatives, own_scores, "left")
    not_above = np.searchsorted(negatives, own_scores, "right")
    wins[:, cluster] = np.bincount(owner, (below + not_above) / 2, size)
  return wins


def _check(scores, **flags) -> tuple[np.ndarray, ...]:
  """Scores float64 [n], finite, and bool [n] flags beside them, or one clear sentence."""
  scores = np.asarray(scores, np.float64)
  if scores.ndim != 1 or not scores.size:
    raise ValueError(f"scores must be [n] and not empty, got {scores.shape}.")
  flags = {name: np.asarray(flag) for name, flag in flags.items()}
  for name, flag in flags.items():
    if flag.dtype != bool or flag.shape != scores.shape:
      raise ValueError(
        f"{name} must be bool {scores.shape} as the scores, got {flag.dtype} {flag.shape}."
      )
  if not np.isfinite(scores).all():
    raise ValueError("scores hold NaN or infinite values, expected finite ones.")
  return scores, *flags.values()
