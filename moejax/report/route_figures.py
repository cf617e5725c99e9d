"""Figures of the route study, drawn from numbers. Needs the extra `plots`.

Every function writes `path`.svg and `path`.png, refuses empty input with a ValueError, and computes
nothing from a model. Losses are in nats for each token. A row is a dict whose keys are named as the
columns of the tables; an interval is NAME, NAME_low and NAME_high. RMF is the route-mediated
fraction; a row says in `interpretable` whether its total damage is told from zero. Where it is not,
RMF and its ends may be None, and what is drawn of them is grey or hollow.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
import os

import matplotlib
import matplotlib.figure
import matplotlib.lines
import matplotlib.patches
import matplotlib.ticker
import numpy as np

from moejax.report import figures
from moejax.report.reduction_figures import LINE_PT, PALETTE

DIRECT, ROUTED, FRACTION = PALETTE[0], PALETTE[1], PALETTE[2]
NOT_INTERPRETABLE = "NOT INTERPRETABLE"

# Of the causal graph, in inches: where the nodes are, and how large.
GRAPH = (8.6, 4.6)
NODES = {"cc": (2.2, 3.25), "ct": (7.1, 3.25), "qp": (2.2, 1.35), "qf": (7.1, 1.35)}
HOW = {"cc": "own route", "ct": "route transplanted", "qp": "route pinned", "qf": "own route"}
NODE_WIDTH, NODE_HEIGHT = 1.7, 0.78
EDGES = {
  "route_pure": ("cc", "ct", PALETTE[0]),
  "route_forward": ("qp", "qf", PALETTE[1]),
  "compute": ("cc", "qp", figures.INK),
  "compute_transplanted": ("ct", "qf", figures.INK),
}

MASKS = {"jump": PALETTE[1], "nonlocal": PALETTE[0], "pure_flux": PALETTE[3]}
CHANNELS = {"excess_compute": DIRECT, "route_forward": ROUTED}
CHANCE, BAND = 0.5, 0.05


def _finite(values: Iterable[float | None]) -> bool:
  """Whether all are there and are finite."""
  return all(x is not None and math.isfinite(x) for x in values)


def _interval(what: str, *found: float | None) -> tuple[float, float, float]:
  """A value, low end and high end; refuses none, what is not finite, and ends upside down."""
  if not _finite(found) or found[1] > found[2]:
    raise ValueError(f"{what} needs a finite value, low end and high end, got {found}")
  return found


def _fraction(what: str, row: Mapping) -> tuple[float, float, float]:
  """The RMF of a row and its ends; NaN for what a row that is not interpretable leaves out."""
  found = [row[key] for key in ("rmf", "rmf_low", "rmf_high")]
  if row["interpretable"]:
    return _interval(f"the RMF of {what}", *found)
  return tuple(x if _finite([x]) else math.nan for x in found)


def _nats(interval: tuple[float, float, float]) -> str:
  """`+0.0175 [+0.0112, +0.0239]`, to the second digit of the interval's length."""
  value, low, high = interval
  size = high - low or abs(value)
  if not size:
    return "0 [0, 0]"
  return _written(interval, "+", int(np.clip(1 - math.floor(math.log10(size)), 2, 9)))


def _written(interval: tuple[float, float, float], sign: str = "", digits: int = 3) -> str:
  value, low, high = (f"{x:{sign}z.{digits}f}".replace("-", "−") for x in interval)
  return f"{value} [{low}, {high}]"


def _line_of(text: str, length: int) -> str:
  """The text on one line of at most so many characters."""
  return figures.shorten(figures.one_line(str(text)), length)


@matplotlib.rc_context(figures.STYLE)
def draw_causal_graph(path: str | os.PathLike, title: str, numbers: Mapping) -> None:
  """The four runs as a 2 × 2 graph: compute from top to bottom, route from left to right.

  Args:
    path: file name without a suffix.
    title: over the graph: the model and the disturbance.
    numbers: the mean losses `cc`, `ct`, `qp` and `qf`; (value, low, high) of the contrasts
      `route_pure` (CT - CC), `route_forward` (QF - QP), `compute` (QP - CC), `compute_transplanted`
      (QF - CT) and `interaction` (route_forward - route_pure); and of `rmf`, None where it is not
      interpretable.
  """
  wanted = (*NODES, *EDGES, "interaction", "rmf")
  if missing := [name for name in wanted if name not in numbers]:
    raise ValueError(f"a causal graph needs the numbers {missing}, which were not given")
  losses = [numbers[name] for name in NODES]
  if not _finite(losses):
    raise ValueError(f"the losses must be finite, got {losses}")
  contrasts = {name: _interval(name, *numbers[name]) for name in (*EDGES, "interaction")}
  rmf = NOT_INTERPRETABLE
  if numbers["rmf"] is not None:
    rmf = _written(_interval("rmf", *numbers["rmf"]))
  figure = matplotlib.figure.Figure(figsize=GRAPH)
  axes = figure.add_axes((0, 0, 1, 1))
  axes.set(xlim=(0, GRAPH[0]), ylim=(0, GRAPH[1]))
  axes.set_axis_off()
  centred = dict(ha="center", va="center")
  for name, (x, y) in NODES.items():
    _draw_node(axes, name, numbers[name])
    if name in ("cc", "ct"):
      axes.text(x, y + 0.62, f"{'clean' if name == 'cc' else 'disturbed'} route", **centred)
    if name in ("cc", "qp"):
      head = f"{'clean' if name == 'cc' else 'disturbed'}\ncompute"
      axes.text(x - 1.3, y, head, **centred, linespacing=1.4)
  for name in EDGES:
    _draw_edge(axes, name, _nats(contrasts[name]))
  axes.text(GRAPH[0] / 2, 4.28, _line_of(title, 85), **centred, fontsize=11, parse_math=False)
  caption = (
    f"interaction = route forward − route pure = {_nats(contrasts['interaction'])} nats\n"
    f"RMF = route forward / total = {rmf}"
  )
  axes.text(GRAPH[0] / 2, 0.42, caption, **centred, linespacing=1.6)
  figures.save_figure(figure, path)


def _draw_node(axes, name: str, loss: float) -> None:
  """A box with the name of a run, its loss and where its route is from."""
  x, y = NODES[name]
  corner = x - NODE_WIDTH / 2, y - NODE_HEIGHT / 2
  style = dict(boxstyle="round,pad=0,rounding_size=0.1", facecolor="#F4F4F4", lw=1.0)
  box = matplotlib.patches.FancyBboxPatch(corner, NODE_WIDTH, NODE_HEIGHT, **style)
  box.set_edgecolor(figures.GREY)
  axes.add_patch(box)
  centred = dict(ha="center", va="center")
  axes.text(x, y + 0.22, rf"$Y_{{{name.upper()}}}$", **centred, fontsize=11)
  axes.text(x, y, f"{loss:.4f} nats", **centred)
  axes.text(x, y - 0.22, HOW[name], **centred, fontsize=8, color="#5C5C5C")


def _draw_edge(axes, name: str, text: str) -> None:
  """An arrow between the nearest sides of two nodes, with the name and size of the contrast."""
  start, stop, colour = EDGES[name]
  (x0, y0), (x1, y1) = NODES[start], NODES[stop]
  level = y0 == y1
  gap = np.array([NODE_WIDTH / 2, 0.0] if level else [0.0, -NODE_HEIGHT / 2])
  style = dict(arrowstyle="-|>", color=colour, lw=1.6, shrinkA=3, shrinkB=3, mutation_scale=13)
  axes.annotate("", np.array([x1, y1]) - gap, np.array([x0, y0]) + gap, arrowprops=style)
  words = "compute, transplanted route" if name == "compute_transplanted" else name
  size, _, ends = text.partition(" [")
  if level:
    words = f"{words.replace('_', ' ')}\n{text}"
    axes.text((x0 + x1) / 2, y0 + 0.26, words, ha="center", va="center", linespacing=1.4)
  else:
    right = start == "ct"
    x = x0 + (-0.12 if right else 0.12)
    words = f"{words}\n{size}\n[{ends}"
    side = "right" if right else "left"
    axes.text(x, (y0 + y1) / 2, words, ha=side, va="center", linespacing=1.4)


@matplotlib.rc_context(figures.STYLE)
def draw_dose_curve(
  path: str | os.PathLike, points: Sequence[Mapping], real: Sequence[Mapping] = ()
) -> None:
  """Against the dose: above, the direct and the routed damage; below, the RMF.

  Args:
    path: file name without a suffix.
    points: rows of the simulated disturbance: `label` (such as its bits), `dose` (total damage
      relative to the 4-bit point), `excess_compute` (the direct channel), `route_forward` (the
      routed one), `rmf`, `rmf_low`, `rmf_high`, `interpretable`. A point that is not interpretable
      is hollow.
    real: rows of a real kernel, alike, on the same scale of doses.

  Dose and damage are on logarithmic scales: a channel that is not positive is an arrow at the foot,
  and a point whose dose is not positive is named under the figure instead. The scale of the RMF
  holds the interpretable points; of the others it may cut off a part.
  """
  rows = [dict(row, real=kind) for kind, group in enumerate((points, real)) for row in group]
  for row in rows:
    row["fraction"] = _fraction(f"the point {row['label']!r}", row)
    found = [row[name] for name in ("dose", *CHANNELS)]
    if not _finite(found):
      raise ValueError(f"the point {row['label']!r} needs a finite dose and channels, got {found}")
  shown = sorted((row for row in rows if row["dose"] > 0), key=lambda row: row["dose"])
  damages = [row[channel] for row in shown for channel in CHANNELS if row[channel] > 0]
  if not damages:
    raise ValueError("a dose curve needs a point with a positive dose and damage, got none")
  figure = matplotlib.figure.Figure(figsize=(7.4, 6.2), layout="constrained")
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
  above.set(xscale="log", yscale="log", ylabel="damage (nats)")
  first, last = shown[0]["dose"], shown[-1]["dose"]
  room = max(1.6, math.sqrt(10 * first / last))  # a decade at least, so that a tick has a number
  above.set_xlim(first / room, last * room)
  foot = max(2.0, (max(damages) / min(damages)) ** 0.12)  # room for arrows under all points
  above.set_ylim(min(damages) / foot, max(damages) * 1.8)
  for axes in (above, below):
    for row in shown:
      axes.axvline(row["dose"], color="#E4E4E4", lw=0.8, zorder=0)
  _draw_channels(above, shown)
  _draw_fractions(below, shown)
  below.set(xlabel="dose: total damage relative to 4 bits", ylabel="RMF")
  below.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
  below.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  _write_doses(figure, above, shown)
  figure.legend(handles=_dose_key(shown), loc="outside upper left", ncols=4, handlelength=1.6)
  if left_out := [row["label"] for row in rows if row["dose"] <= 0]:
    names = ", ".join(_line_of(label, 20) for label in left_out)
    figure.supxlabel(f"not drawn, the dose is not positive: {names}", fontsize=8, parse_math=False)
  figures.save_figure(figure, path)


def _marker(row: Mapping, colour: str) -> dict:
  """Shape says the source, filling whether it is interpretable."""
  face = colour if row["interpretable"] else "white"
  return dict(marker="s" if row["real"] else "o", ms=5.5, mfc=face, mec=colour, ls="none")


def _draw_channels(axes, shown: Sequence[Mapping]) -> None:
  """Direct and routed damage; a line has a gap where they are not positive."""
  for name, colour in CHANNELS.items():
    for kind in (False, True):
      group = [row for row in shown if row["real"] == kind]
      heights = [row[name] if row[name] > 0 else math.nan for row in group]
      style = dict(color=colour, ls=":" if kind else "-", lw=1.3)
      axes.plot([row["dose"] for row in group], heights, **style)
    for row in shown:
      if row[name] > 0:
        axes.plot(row["dose"], row[name], **_marker(row, colour))
      else:
        arrow = _marker(row, colour) | dict(marker="v", transform=axes.get_xaxis_transform())
        axes.plot(row["dose"], 0.03, **arrow)


def _draw_fractions(axes, shown: Sequence[Mapping]) -> None:
  """The RMF and its intervals; the scale is that of the interpretable ones."""
  for kind in (False, True):
    group = [row for row in shown if row["real"] == kind and row["interpretable"]]
    style = dict(color=FRACTION, ls=":" if kind else "-", lw=1.3)
    axes.plot([row["dose"] for row in group], [row["fraction"][0] for row in group], **style)
  for row in shown:
    value, low, high = row["fraction"]
    alpha = 1.0 if row["interpretable"] else 0.5
    axes.vlines(row["dose"], low, high, FRACTION, lw=1.1, alpha=alpha)
    axes.plot(row["dose"], value, **_marker(row, FRACTION))
  axes.axhline(0, color=figures.GREY, lw=0.8, zorder=0)
  axes.set_ylim(*_limits([row["fraction"] for row in shown if row["interpretable"]]))


def _limits(intervals: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
  """A scale of fractions that holds all of some intervals, and 0; (0, 1) for none."""
  ends = [x for interval in intervals for x in interval] or [1.0]
  low, high = min(0.0, *ends), max(0.0, *ends)
  margin = 0.06 * (high - low) or 0.06
  return low - margin, high + margin


def _write_doses(figure, axes, shown: Sequence[Mapping]) -> None:
  """Writes each point's label upright over the axes, apart from its neighbours, with a leader."""
  figure.draw_without_rendering()  # settles where the axes lie on the page
  scale = 72 / figure.dpi
  transform = axes.transData
  at = np.array([transform.transform((row["dose"], 1.0))[0] * scale for row in shown])
  for row, x, place in zip(shown, at, _apart(at, LINE_PT + 1)):
    axes.annotate(
      _line_of(row["label"], 20),
      (row["dose"], 1.0),
      (place - x, 10.0),
      xycoords=axes.get_xaxis_transform(),
      textcoords="offset points",
      rotation=90,
      ha="center",
      va="bottom",
      fontsize=8,
      parse_math=False,
      arrowprops=dict(arrowstyle="-", color="#BBBBBB", lw=0.7, shrinkA=0, shrinkB=0),
    )


def _apart(at: np.ndarray, room: float) -> np.ndarray:
  """Rising places nearest to `at` that are at least `room` apart."""
  # Without the room that those before take, places only have to rise: isotonic regression.
  blocks = []
  for place in at - room * np.arange(len(at)):
    blocks.append([place, 1])
    while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
      (left, count), (right, more) = blocks[-2:]
      blocks[-2:] = [[(left * count + right * more) / (count + more), count + more]]
  places, counts = zip(*blocks)
  return np.repeat(places, counts) + room * np.arange(len(at))


def _dose_key(shown: Sequence[Mapping]) -> list:
  """What the colours, and where there are several the shapes and fillings, stand for."""
  line = matplotlib.lines.Line2D
  names = {DIRECT: "direct", ROUTED: "routed", FRACTION: "RMF"}
  handles = [line([], [], color=colour, lw=2, label=name) for colour, name in names.items()]
  dot = lambda label, **style: line(
    [], [], **dict(ls="none", ms=5.5, color=figures.INK, marker="o") | style, label=label
  )
  if any(row["real"] for row in shown):
    handles += [dot("simulated"), dot("real kernel", marker="s")]
  if not all(row["interpretable"] for row in shown):
    handles.append(dot("not interpretable", mfc="white"))
  if any(row[channel] <= 0 for row in shown for channel in CHANNELS):
    handles.append(dot("not positive", marker="v"))
  return handles


def _draw_rows(axes, labels: Sequence[str], texts: Sequence[str]) -> None:
  """One horizontal line of the page for each: its label to the left, its numbers to the right."""
  axes.set_yticks(range(len(labels)), [_line_of(x, 40) for x in labels], parse_math=False)
  axes.set_ylim(len(labels) - 0.4, -0.6)
  axes.tick_params(axis="y", length=0)
  axes.spines["left"].set_visible(False)
  for at, text in enumerate(texts):
    axes.annotate(
      text,
      (1, at),
      (10, 0),
      xycoords=axes.get_yaxis_transform(),
      textcoords="offset points",
      va="center",
      fontsize=8,
    )


@matplotlib.rc_context(figures.STYLE)
def draw_auc_panel(path: str | os.PathLike, rows: Sequence[Mapping]) -> None:
  """Intervals of AUCs, from top to bottom, with the band about chance in which a probe fails.

  Args:
    path: file name without a suffix.
    rows: `name`, `auc`, `auc_low`, `auc_high`, and where the paper has it, its value as `paper`.
  """
  if not rows:
    raise ValueError("a panel of AUCs needs at least one row, got none")
  found = [_interval(r["name"], r["auc"], r["auc_low"], r["auc_high"]) for r in rows]
  if any(not 0 <= x <= 1 for interval in found for x in interval):
    raise ValueError("AUCs and their ends lie between 0 and 1")
  figure = matplotlib.figure.Figure(figsize=(7.4, 1.5 + 0.27 * len(rows)), layout="constrained")
  axes = figure.add_subplot()
  axes.axvspan(CHANCE - BAND, CHANCE + BAND, color="#EDEDED", lw=0, zorder=0)
  axes.axvline(CHANCE, color=figures.GREY, lw=0.9, zorder=0.5)
  papers = [row.get("paper") for row in rows]
  for at, ((value, low, high), paper) in enumerate(zip(found, papers)):
    colour = figures.GREY if low <= CHANCE <= high else PALETTE[0]
    axes.hlines(at, low, high, colour, lw=1.8)
    axes.plot(value, at, "o", color=colour, ms=6)
    if paper is not None:
      axes.plot(paper, at, "D", mfc="none", mec=PALETTE[1], ms=5.5, zorder=3)
  _draw_rows(axes, [row["name"] for row in rows], [_written(x) for x in found])
  ends = [x for interval in found for x in interval] + [x for x in papers if x is not None]
  low, high = min(CHANCE - 2 * BAND, *ends), max(CHANCE + 2 * BAND, *ends)
  axes.set(xlabel="AUC", xlim=(max(0, low - 0.02), min(1, high + 0.02)))
  line = matplotlib.lines.Line2D
  handles = [
    line([], [], color=PALETTE[0], marker="o", label="excludes 0.5"),
    line([], [], color=figures.GREY, marker="o", label="covers 0.5"),
    matplotlib.patches.Patch(color="#EDEDED", label=f"0.5 ± {BAND}"),
  ]
  if any(x is not None for x in papers):
    style = dict(ls="none", marker="D", mfc="none", mec=PALETTE[1], ms=5.5)
    handles.append(line([], [], **style, label="paper"))
  figure.legend(handles=handles, loc="outside upper left", ncols=4, handlelength=1.6)
  figures.save_figure(figure, path)


@matplotlib.rc_context(figures.STYLE)
def draw_attribution(
  path: str | os.PathLike, by_layer: Sequence[Mapping], shares: Mapping[str, float]
) -> None:
  """Where routed damage comes from: left by layer, right by the mechanism of each token.

  Args:
    path: file name without a suffix.
    by_layer: `layer`, and the route_forward of pinning this layer only, `pin_only`, and all but
      this layer, `pin_others`.
    shares: signed shares of the summed harm of `jump`, `nonlocal` and `pure_flux` tokens; they
      add up to 1.
  """
  if not by_layer or not shares:
    raise ValueError("a figure of attribution needs at least one layer and the shares")
  whole = set(shares) == set(MASKS) and _finite(shares.values())
  if not whole or abs(sum(shares.values()) - 1) > 0.01:
    raise ValueError(f"the shares of {', '.join(MASKS)} must add up to 1, got {dict(shares)}")
  titles = {"pin_only": "only this layer pinned", "pin_others": "all but this layer pinned"}
  layers = [row["layer"] for row in by_layer]
  if len(set(layers)) < len(layers):
    raise ValueError(f"expected one row for each layer, got {layers}")
  if not _finite(row[name] for row in by_layer for name in titles):
    raise ValueError("the route_forward of each layer must be finite")
  width = np.clip(2.2 + 0.2 * len(layers), 4.0, 7.5)
  figure = matplotlib.figure.Figure(figsize=(width + 3.6, 4.2), layout="constrained")
  grid = figure.subplot_mosaic(
    [["pin_only", "shares"], ["pin_others", "shares"]], width_ratios=(width, 3.6)
  )
  figure.get_layout_engine().set(wspace=0.05)
  for (name, title), colour in zip(titles.items(), (PALETTE[2], PALETTE[6])):
    axes = grid[name]
    axes.bar(layers, [row[name] for row in by_layer], 0.75, color=colour)
    axes.axhline(0, color=figures.GREY, lw=0.8)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlim(min(layers) - 0.7, max(layers) + 0.7)
  grid["pin_only"].sharex(grid["pin_others"])
  grid["pin_only"].tick_params(labelbottom=False)
  grid["pin_others"].set(xlabel="layer", xticks=sorted(layers)[:: math.ceil(len(layers) / 16)])
  figure.supylabel("route forward (nats)", fontsize=9)
  _draw_shares(grid["shares"], shares)
  figures.save_figure(figure, path)


def _draw_shares(axes, shares: Mapping[str, float]) -> None:
  """A bar for each mask, with its signed share at its end."""
  heights = [shares[name] for name in MASKS]
  bars = axes.barh(range(len(MASKS)), heights, 0.6, color=list(MASKS.values()))
  labels = [f"{x:+.3f}".replace("-", "−") for x in heights]
  axes.bar_label(bars, labels, fontsize=8, padding=3)
  axes.axvline(0, color=figures.GREY, lw=0.8)
  axes.set_yticks(range(len(MASKS)), [name.replace("_", " ") for name in MASKS])
  axes.tick_params(axis="y", length=0)
  axes.spines["left"].set_visible(False)
  axes.invert_yaxis()
  axes.set_title("share of the signed sum of harm", fontsize=9, loc="left")
  low, high = min(0.0, *heights), max(0.0, *heights)
  room = 0.25 * (high - low)
  axes.set_xlim(low - room * (low < 0), high + room)


@matplotlib.rc_context(figures.STYLE)
def draw_headline(path: str | os.PathLike, rows: Sequence[Mapping]) -> None:
  """The RMF of each disturbance, by model.

  Args:
    path: file name without a suffix.
    rows: `disturbance`, `model`, `rmf`, `rmf_low`, `rmf_high`, `interpretable`; one for each
      disturbance and model. Disturbances and models are drawn in order of appearance.
  """
  if not rows:
    raise ValueError("a headline figure needs at least one row, got none")
  found = {(row["disturbance"], row["model"]): row for row in rows}
  if len(found) < len(rows):
    raise ValueError("expected one row for each disturbance and model, got one twice")
  fractions = {(d, m): _fraction(f"{m} under {d}", row) for (d, m), row in found.items()}
  sure = {key: fractions[key] for key, row in found.items() if row["interpretable"]}
  models = list(dict.fromkeys(model for _, model in found))
  lines = []  # from the top: a disturbance alone, then with each of its models
  for disturbance in dict.fromkeys(disturbance for disturbance, _ in found):
    keys = [(disturbance, model) for model in models]
    lines += [(disturbance,), *(key for key in keys if key in found)]
  figure = matplotlib.figure.Figure(figsize=(7.4, 0.8 + 0.25 * len(lines)), layout="constrained")
  axes = figure.add_subplot()
  axes.axvline(0, color=figures.GREY, lw=0.8, zorder=0)
  texts = dict.fromkeys(found, NOT_INTERPRETABLE) | {key: _written(x) for key, x in sure.items()}
  _draw_rows(axes, [line[-1] for line in lines], [texts.get(line, "") for line in lines])
  for at, (line, *written) in enumerate(zip(lines, axes.get_yticklabels(), axes.texts)):
    if line not in found:
      written[0].set_fontweight("bold")
      continue
    value, low, high = fractions[line]
    colour = PALETTE[models.index(line[1]) % len(PALETTE)] if line in sure else "#BBBBBB"
    axes.hlines(at, low, high, colour, lw=1.8)
    axes.plot(value, at, "o", color=colour, mfc=colour if line in sure else "white", ms=6)
    if line not in sure:
      for text in written:
        text.set_color(figures.GREY)
  axes.set(xlabel="route-mediated fraction (RMF)", xlim=_limits(list(sure.values())))
  figures.save_figure(figure, path)
