"""The whole route study of every shipped model, and their headline side by side.

    python -m experiments.route.all_models --out=out/route

Takes the flags of `run_all` but --model. out/route/NAME/ holds the study of a model; headline.tsv,
headline.svg and models.tsv those of all: RMF of every disturbance, and minutes and peak memory.
"""

import resource
import time

import jax

from experiments import study as base
from experiments.route import run_all
from experiments.route import study as studies
from moejax import checkpoints
from moejax.report import paper_figures, route_figures
from moejax.report import route_tables as tables
from moejax.report.tables import write_tsv


def run(names: list[str]) -> list[str]:
  """Runs the models one after another; returns what to say."""
  rows, said, costs = [], [], []
  for name in names:
    start = time.monotonic()
    study = studies.from_flags(name)
    said += [f"{name}: {line}" for line in run_all.run(study)]
    rows += tables.FOUR_RUN.read(study.out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of the process so far
    costs.append((name, f"{(time.monotonic() - start) / 60:.2f}", f"{peak:.2f}"))
    out = study.out.parent
    del study
    jax.clear_caches()
  columns = [column.name for column in tables.FOUR_RUN.columns]
  cells = ([c.format(row[c.name]) for c in tables.FOUR_RUN.columns] for row in rows)
  write_tsv(out / "headline.tsv", columns, cells)
  write_tsv(out / "models.tsv", ("model", "minutes", "peak_gib"), costs)
  route_figures.draw_headline(out / "headline", rows)
  return [*said, paper_figures.NOTES["route"]]


if __name__ == "__main__":
  base.main(run, checkpoints.shipped)
