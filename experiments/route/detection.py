"""A flip is easier to see than whether it harms: areas under the curve and a probe battery.

    python -m experiments.route.detection --model=olmoe-nano --out=out/route

Scores are what is seen at inference, of the disturbed run. detection.tsv with the mixture identity,
probes.tsv, detection.svg. Seconds, once the four runs are there.
"""

import numpy as np

from experiments.route import study as studies
from experiments.route.measure import estimate, RESAMPLES
from moejax.analysis import detection as auc
from moejax.analysis.bootstrap import Estimate
from moejax.report import route_figures
from moejax.report import route_tables as tables

TABLES = (tables.DETECTION, tables.PROBES)
FOLDS = 5
IDENTITY = 1e-12  # what the mixture may be off by


def check(study: studies.Study) -> None:
  """Refuses a study that has no folds."""
  if study.num_sequences < FOLDS:
    raise ValueError(f"detection: {FOLDS} folds need {FOLDS} sequences, got {study.num_sequences}.")


def run(study: studies.Study) -> list[str]:
  """Writes tables and a figure; returns what to say."""
  check(study)
  populations = detection_rows(study)
  study.write(tables.DETECTION, populations, "detection")
  probes = probe_rows(study)
  study.write(tables.PROBES, probes, "detection")
  drawn = [dict(row, name=row.get("question", row.get("probe"))) for row in populations + probes]
  for row in drawn:
    figure = row["paper"].rpartition(" ")[2]
    row["paper"] = float(figure) if figure else None
  drawn = [row for row in drawn if row["auc"] is not None]
  if drawn:
    route_figures.draw_auc_panel(study.out / "detection", drawn)
  said = {row["question"]: row["auc"] for row in populations}
  inside = sum(row["within_band"] for row in probes)
  return [
    "detection: "
    + ", ".join(f"{q} {said[q]:.3f}" for q in ("flip", "harm", "benefit") if said[q] is not None)
    + f"; {inside} of {len(probes)} probes of harm given a flip within 0.05 of chance"
  ]


def detection_rows(study: studies.Study) -> list[dict]:
  """The margin of the scoring layer against each question, and the mixture of benefit."""
  four, layer = study.four, study.routers[-1]
  score, harmful = -four.qf.margins[layer].astype(np.float64), four.route_forward > 0
  flipped = four.flips()[layer]
  cluster = np.broadcast_to(np.arange(len(score))[:, None], score.shape)
  mixture = auc.benefit_mixture(score.ravel(), harmful.ravel(), flipped.ravel())
  if mixture.residual is not None and not mixture.residual <= IDENTITY:
    raise ValueError(f"detection: the mixture identity is off by {mixture.residual:.3g}.")
  everything = np.ones(score.shape, bool)
  cases = (
    ("flip", "all tokens", flipped, everything),
    ("harm", "flipped tokens", harmful, flipped),
    ("benefit", "all tokens", harmful, everything),
    ("benefit/no_flip", "harmful, and harmless without a flip", harmful, harmful | ~flipped),
    ("benefit/harmless_flip", "harmful, and harmless with a flip", harmful, harmful | flipped),
  )
  weights = {
    "benefit/no_flip": mixture.unflipped_weight,
    "benefit/harmless_flip": mixture.flipped_weight,
  }
  rows = []
  for question, population, positive, among in cases:
    whole = question == "benefit"
    labels = positive[among]
    rows.append(
      dict(
        question=question,
        population=population,
        **estimate("auc", interval(score[among], labels, cluster[among], study.seed)),
        positives=int(labels.sum()),
        negatives=int((~labels).sum()),
        weight=weights.get(question),
        reconstruction=mixture.reconstruction if whole else None,
        residual=mixture.residual if whole else None,
        positive_rate=float(labels.mean()) if labels.size else 0.0,
        paper=study.paper("detection", question, "auc"),
      )
    )
  return rows


def interval(score, positive, cluster, seed: int) -> Estimate | None:
  """The area and its interval; none where only one class is there."""
  if not 0 < positive.sum() < positive.size:
    return None
  return auc.cluster_auc_interval(score, positive, cluster, seed=seed, resamples=RESAMPLES)


def features(study: studies.Study) -> dict[str, np.ndarray]:
  """[B, N, F] by name: the scoring layer's, with the four tokens before, and all layers'."""
  run, routers = study.four.qf, study.routers
  top_k = study.model.config.top_k
  every = auc.layer_features(run.margins[routers], run.router_logits[routers], top_k)
  scoring = every[..., -every.shape[-1] // len(routers) :]
  return dict(scoring_layer=scoring, temporal=auc.temporal_features(scoring), cross_layer=every)


def probe_rows(study: studies.Study) -> list[dict]:
  """Every probe on the flipped tokens, out of fold by sequence."""
  flipped = study.four.flips()[study.routers[-1]]
  harmful = (study.four.route_forward > 0)[flipped]
  sequence = np.nonzero(flipped)[0]
  known = features(study)
  battery = [(name, "scoring_layer") for name in auc.PROBES]
  battery += [("boosting", "temporal"), ("logistic", "cross_layer"), ("boosting", "cross_layer")]
  if not 0 < harmful.sum() < harmful.size or len(np.unique(sequence)) < FOLDS:
    return []
  rows = []
  for probe, kind in study.progress(battery, "probes"):
    x = known[kind][flipped]
    scores = auc.cross_validated_scores(auc.PROBES[probe], x, harmful, sequence, FOLDS)
    found = interval(scores, harmful, sequence, study.seed)
    rows.append(
      dict(
        probe=f"{kind} {probe}",
        features=x.shape[1],
        flips=len(harmful),
        harmful_rate=float(harmful.mean()),
        **estimate("auc", found),
        within_band=auc.within_band(found),
        paper=study.paper("probes", _paper_name(kind, probe), "auc"),
      )
    )
  return rows


def _paper_name(kind: str, probe: str) -> str:
  """What the paper's probe of these features is called in its figures."""
  if kind == "cross_layer":
    return "cross_layer_trees" if probe == "boosting" else "cross_layer_logistic"
  return "combined_logistic" if (kind, probe) == ("scoring_layer", "logistic") else probe


if __name__ == "__main__":
  studies.main(run)
