"""How much of each disturbance's damage goes through routing: the study's headline.

    python -m experiments.route.four_run --model=olmoe-nano --out=out/route

KV quantisation, weights, activations and other reduction contracts under one apparatus:
four_run.tsv, the causal graph of the primary disturbance with its tokens in four_run.npz, and
headline.svg. Three minutes for a nano model.
"""

import numpy as np

from experiments.route import study as studies
from experiments.route import weight_bound
from experiments.route.measure import describe, mean_of
from moejax import combine
from moejax.inference import (
  ActivationQuantization,
  KvQuantization,
  PackedKv,
  Reduction,
  WeightQuantization,
)
from moejax.report import route_figures
from moejax.report import route_tables as tables
from moejax.report.files import atomic_path

TABLES = (tables.FOUR_RUN,)
SCHEMES = (combine.A, combine.B, combine.P32)


def disturbances(study: studies.Study) -> list:
  """The primary one first."""
  return [
    study.disturbance,
    PackedKv(4),
    WeightQuantization(4),
    WeightQuantization(3),
    ActivationQuantization(),
    *(Reduction(scheme, study.seed) for scheme in SCHEMES),
  ]


def run(study: studies.Study) -> list[str]:
  """Writes table and figures; returns what to say."""
  rows = write(study, disturbances(study))
  return [f"four runs, {row['disturbance']}: {describe(row)}" for row in rows]


def write(study: studies.Study, chosen: list) -> list[dict]:
  """The rows of disturbances, the primary one first; written and drawn."""
  rows = []
  for disturbance in study.progress(chosen, "four runs"):
    row, _ = study.contrasts(disturbance)
    rows.append(row | dict(paper=paper(study, disturbance)))
  study.write(tables.FOUR_RUN, rows, "four_run")
  keep_tokens(study)
  draw(study, rows)
  return rows


def keep_tokens(study: studies.Study) -> None:
  """The primary disturbance token by token: losses [B, N], flips [L, B, N], tokens [B, length]."""
  four = study.four
  losses = {f"nll_{name}": getattr(four, name).nll for name in ("cc", "qp", "qf", "ct")}
  with atomic_path(study.out / "four_run.npz") as path, open(path, "wb") as file:
    np.savez_compressed(file, tokens=study.tokens, flips=four.flips(), **losses)


def paper(study: studies.Study, disturbance) -> str:
  """RMF of the paper where it has this disturbance."""
  if disturbance == KvQuantization(4):
    return study.paper("four_run", "", "rmf")
  if isinstance(disturbance, WeightQuantization):
    return weight_bound.PAPER
  return ""


def draw(study: studies.Study, rows: list[dict]) -> None:
  """The two figures."""
  four, names = study.four, ("route_forward", "route_pure", "interaction", "rmf")
  numbers = {name: triple(rows[0], name) for name in names}
  numbers |= {name: float(getattr(four, name).nll.mean()) for name in ("cc", "ct", "qp", "qf")}
  transplanted = mean_of(four.qf.nll.astype(np.float64) - four.ct.nll, study.seed)
  numbers["compute"] = triple(rows[0], "excess_compute")
  numbers["compute_transplanted"] = transplanted.value, transplanted.low, transplanted.high
  title = f"{study.model.name}, {study.disturbance.name}"
  route_figures.draw_causal_graph(study.out / "causal_graph", title, numbers)
  named = [dict(row, model=study.model.name) for row in rows]
  route_figures.draw_headline(study.out / "headline", named)


def triple(row: dict, name: str):
  """(value, low, high) of an estimate, or None."""
  values = tuple(row[key] for key in (name, f"{name}_low", f"{name}_high"))
  return None if None in values else values


if __name__ == "__main__":
  studies.main(run)
