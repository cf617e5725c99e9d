"""Experts of 4 and 3 bits, round to nearest: the same four runs in another domain of damage.

    python -m experiments.route.weight_bound --model=olmoe-nano --out=out/route

A conservative lower bound, and no measurement of the KV figure. weight_bound.tsv. A minute for a
nano model.
"""

import math

from experiments.route import study as studies
from experiments.route.measure import describe
from moejax.inference import WeightQuantization
from moejax.report import paper_figures
from moejax.report import route_tables as tables

TABLES = (tables.WEIGHT_BOUND,)
BITS = (4, 3)
GROUP = 64  # of inputs, or the largest divisor of both matrices' below it
PAPER = "OLMoE " + " to ".join(
  paper_figures.beside("weight_bound", "olmoe/w4 and w3", f"rmf_{end}", study="route")
  for end in ("min", "max")
)


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  config = study.model.config
  group = math.gcd(GROUP, math.gcd(config.hidden_size, config.expert_size))
  points = [WeightQuantization(bits, g) for bits in BITS for g in (None, group)]
  rows = []
  for point in study.progress(points, "weights"):
    row, _ = study.contrasts(point)
    rows.append(dict(row, bits=point.bits, group=point.group, paper=PAPER))
  study.write(tables.WEIGHT_BOUND, rows, "weight_bound")
  return [f"weights, {row['disturbance']}: {describe(row)}" for row in rows]


if __name__ == "__main__":
  studies.main(run)
