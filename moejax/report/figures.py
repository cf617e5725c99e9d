"""Pictures of results. Needs the extra `plots`."""

import os

import matplotlib.figure
import numpy as np

from moejax.combine import Spread
from moejax.report import files


def draw_spreads(path: str | os.PathLike, spreads: dict[str, Spread]) -> None:
  """Left: distances of every order, sorted. Right: classes against distinct outputs.

  The figure is written to `path`.
  """
  figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  for name, spread in spreads.items():
    share = (np.arange(len(spread.linf)) + 1) / len(spread.linf)
    left.step(np.sort(spread.linf), share, where="post", label=name)
  left.set(xlabel="max |sum - exact|", ylabel="share of orders", ylim=(0, 1.02))
  left.legend(frameon=False)
  at = np.arange(len(spreads))
  for offset, label, heights in (
    (-0.2, "structural classes", [s.num_classes for s in spreads.values()]),
    (0.2, "distinct outputs", [s.num_outputs for s in spreads.values()]),
  ):
    right.bar_label(right.bar(at + offset, heights, 0.38, label=label), fontsize=8)
  right.set(xticks=at, xticklabels=list(spreads), ylabel="orders that differ")
  right.margins(y=0.12)
  right.legend(frameon=False)
  with files.atomic_path(path) as temporary:
    figure.savefig(temporary, dpi=120)
