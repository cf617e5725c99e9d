"""Pictures of results. Needs the extra `plots`."""

import itertools
import os
import pathlib

import matplotlib
import matplotlib.figure
import matplotlib.font_manager
import numpy as np

from moejax.combine import Spread
from moejax.report import files

INK, GREY = "#333333", "#8A8A8A"
STYLE = {
  "font.family": ["DejaVu Sans"],  # shipped with matplotlib, so it is always there
  "font.size": 9.0,
  "axes.edgecolor": GREY,
  "axes.labelcolor": INK,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "text.color": INK,
  "xtick.color": INK,
  "xtick.labelsize": 8.0,
  "ytick.color": INK,
  "ytick.labelsize": 8.0,
  "legend.frameon": False,
  "legend.fontsize": 9.0,
}

# Families that hold Han characters, by the start of their names, in order of preference.
CJK_FAMILIES = (
  *("Noto Sans CJK SC", "Noto Sans SC", "Noto Sans CJK", "Source Han Sans", "WenQuanYi"),
  *("PingFang", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "Droid Sans Fallback"),
  *("Arial Unicode MS", "AR PL"),
)


def save_figure(
  figure: matplotlib.figure.Figure, path: str | os.PathLike, description: str = ""
) -> None:
  """Writes `path`.svg and `path`.png; equal figures give equal bytes.

  Args:
    figure: the figure to save.
    path: where, without a suffix; both files are there whole, or neither is new.
    description: text to store in the metadata of both files.
  """
  path = pathlib.Path(path)
  metadata = {"Description": description} if description else {}
  with (
    matplotlib.rc_context({"svg.hashsalt": "moejax", "svg.fonttype": "none"}),
    files.atomic_path(path.with_name(path.name + ".svg")) as svg,
    files.atomic_path(path.with_name(path.name + ".png")) as png,
  ):
    figure.savefig(svg, metadata=metadata | {"Date": None})
    figure.savefig(png, metadata=metadata, dpi=150)


def one_line(text: str) -> str:
  """The text on one line: breaks as arrows, blanks single, what XML may not hold as U+FFFD."""
  line = " ".join(text.replace("\n", "↵").split())
  return "".join(c if c.isprintable() else "\ufffd" for c in line) or "(blank)"


def shorten(text: str, length: int) -> str:
  """The text, cut at `length` characters with an ellipsis as the last."""
  return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def typeface(text: str) -> tuple[list[str], set[str]]:
  """The font families to set `text` in, and the characters of it that they hold."""
  families = list(STYLE["font.family"])
  drawable = _held(text, families[0])
  installed = sorted({font.name for font in matplotlib.font_manager.fontManager.ttflist})
  for start in CJK_FAMILIES:
    for family in (name for name in installed if name.startswith(start)):
      if more := _held(text, family) - drawable:
        families.append(family)
        drawable |= more
  return families, drawable


def _held(text: str, family: str) -> set[str]:
  """The characters of `text` for which a font family has a glyph."""
  wanted = matplotlib.font_manager.FontProperties(family=[family])
  path = matplotlib.font_manager.findfont(wanted)
  charmap = matplotlib.font_manager.get_font(path).get_charmap()
  return {character for character in text if ord(character) in charmap}


def replace_missing(text: str, drawable: set[str], number: str) -> str:
  """The text with each run of characters outside `drawable` replaced by `number`."""
  runs = itertools.groupby(text, key=lambda character: character in drawable)
  return "".join("".join(run) if held else number for held, run in runs)


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
