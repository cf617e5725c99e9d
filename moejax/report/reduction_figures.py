"""Figures of the reduction study, drawn from counts. Needs the extra `plots`.

Every function writes `path`.svg and `path`.png, refuses empty input with a ValueError, and computes
nothing from a model. A branch is one decoded continuation; a basin, all branches with the same one.
"""

from collections.abc import Sequence
import itertools
import os

import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.patches
import matplotlib.path
import matplotlib.ticker
import numpy as np

from moejax.report import figures

# Paul Tol's muted scheme, safe for the colour-blind.
PALETTE = (
  *("#332288", "#CC6677", "#117733", "#88CCEE", "#882255"),
  *("#999933", "#44AA99", "#AA4499", "#DDCC77"),
)
LINE_PT = 11.0  # height of one line of 8-point text
DIGIT_PT = 5.2  # width of one character of it

HEAT = ("#CEDAEA", "#9FB7D8", "#5878AA", "#1F2F5C")  # one hue, from light to dark
ALLUVIAL_PT = 330.0  # height of all branches together

SCHEMES = ("P32", "C", "A", "B")
MEASURES = ("routes", "tokens")
AXES = {
  "native": "against the native reference",
  "canonical": "against the scheme's canonical reference",
}


@matplotlib.rc_context(figures.STYLE)
def draw_rank_frequency(path: str | os.PathLike, curves: dict[str, Sequence[int]]) -> None:
  """Basin sizes by rank, one line for each horizon or scheme, with the counts at the points.

  Args:
    path: file name without a suffix.
    curves: name → positive integer counts by rank, falling. More than three equal counts in a row
      get one label, `1 ×37`; a count for which the page has no room is left out.
  """
  counts = {name: _falling_counts(name, values) for name, values in curves.items()}
  if not counts:
    raise ValueError("a rank-frequency figure needs at least one curve, got none")
  ranks = max(map(len, counts.values()))
  width = np.clip(3 + 0.3 * ranks, 6, 12)
  figure = matplotlib.figure.Figure(figsize=(width, 4.4), layout="constrained")
  axes = figure.add_subplot()
  for index, (name, values) in enumerate(counts.items()):
    colour, at = PALETTE[index % len(PALETTE)], np.arange(1, len(values) + 1)
    label = f"{name}: {values.sum()} in {len(values)} basin{'s' * (len(values) > 1)}"
    axes.plot(at, values, "osD^v"[index % 5] + "-", color=colour, ms=4, lw=1.2, label=label)
  every = np.concatenate(list(counts.values()))
  if every.max() > 10 * every.min():
    axes.set_yscale("log")
    axes.set_ylim(every.min() / 1.6, every.max() * 1.6)
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  else:
    axes.set_ylim(0, 1.12 * every.max())
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
  axes.set(xlabel="basin rank", ylabel="branches in the basin", xlim=(0.5, ranks + 0.5))
  axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(min(ranks, 20), integer=True))
  columns = max(1, int(width // 2.8))
  figure.legend(loc="outside upper left", ncols=min(len(counts), columns), handlelength=1.6)
  _write_counts(figure, axes, list(counts.values()))
  figures.save_figure(figure, path)


def _falling_counts(name: str, values: Sequence[int]) -> np.ndarray:
  """The counts as an int array; refuses what is not a basin's rank-frequency."""
  counts = np.asarray(values)
  if counts.ndim != 1 or not counts.size:
    raise ValueError(f"curve {name!r} needs counts by rank, got shape {counts.shape}")
  if counts.dtype.kind not in "iu" or counts.min() < 1 or (counts[1:] > counts[:-1]).any():
    raise ValueError(f"curve {name!r} needs positive integer counts that fall with the rank")
  return counts.astype(np.int64)


def _write_counts(figure, axes, curves: list[np.ndarray]) -> None:
  """Writes each count near its point: the nearest place free of points and of earlier counts."""
  figure.draw_without_rendering()  # settles where the axes lie on the page
  scale = 72 / figure.dpi
  frame = np.asarray(axes.bbox.extents) * scale

  def on_page(rank, count):
    return axes.transData.transform(np.stack([rank, count], axis=-1)) * scale

  taken = [
    (*(on_page(rank, count) - 3), *(on_page(rank, count) + 3))
    for counts in curves
    for rank, count in enumerate(counts, start=1)
  ]
  lines = []
  for counts in curves:
    at = np.arange(1, len(counts) + 1)
    xs, ys = on_page(at, counts).T
    fine = np.linspace(1, len(counts), 12 * len(counts))
    xs, ys = np.interp(fine, at, xs), np.interp(fine, at, ys)
    lines += zip(xs - 1, ys - 1, xs + 1, ys + 1)
  for index, counts in enumerate(curves):
    colour = PALETTE[index % len(PALETTE)]
    for rank, count, text in _count_labels(counts):
      x, y = on_page(rank, count)
      half = (DIGIT_PT * len(text) / 2 + 1, LINE_PT / 2 - 1)
      # Beside the lines where that is near; elsewhere on them, but never on another count.
      place = _free_place(x, y, half, taken + lines, frame, 2.5 * LINE_PT)
      place = place or _free_place(x, y, half, taken, frame, 15 * LINE_PT)
      if place is None:
        continue
      taken.append((place[0] - half[0], place[1] - half[1], place[0] + half[0], place[1] + half[1]))
      offset = (place[0] - x, place[1] - y)
      line = dict(arrowstyle="-", lw=0.5, color=colour, shrinkA=0, shrinkB=2)
      axes.annotate(
        text,
        (rank, count),
        offset,
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=8,
        color=_darker(colour),
        arrowprops=line if np.hypot(*offset) > half[0] + LINE_PT else None,
        bbox=dict(boxstyle="square,pad=0.05", facecolor="white", edgecolor="none", alpha=0.8),
        zorder=1.9,  # under the lines, so a label never cuts one
      ).set_in_layout(False)


def _count_labels(counts: np.ndarray):
  """Yields (rank, count, text): each point, or the middle of a run of more than three equals."""
  rank = 1
  for count, run in itertools.groupby(counts.tolist()):
    length = len(list(run))
    if length > 3:
      yield rank + length // 2, count, f"{count} ×{length}"
    else:
      yield from ((rank + step, count, str(count)) for step in range(length))
    rank += length


def _free_place(x, y, half, taken, frame, far) -> tuple[float, float] | None:
  """The centre nearest to (x, y) whose box of half-sizes `half` overlaps none taken, in points."""
  left, bottom, right, top = np.asarray(taken).T
  steps = np.arange(-15, 16)
  dx, dy = (grid.ravel() for grid in np.meshgrid(steps * 3.0, steps * LINE_PT / 2))
  # Upwards and to the right first: the curves fall, so the page is empty there.
  away = np.hypot(dx, dy) + 4 * (dy < 0) + 3 * (dx < 0)
  near = np.argsort(away, kind="stable")[: np.count_nonzero(away <= far)]
  for at_x, at_y in zip(x + dx[near], y + dy[near]):
    low, high = (at_x - half[0], at_y - half[1]), (at_x + half[0], at_y + half[1])
    inside = frame[0] < low[0] and high[0] < frame[2] and frame[1] < low[1] and high[1] < frame[3]
    free = (left >= high[0]) | (right <= low[0]) | (bottom >= high[1]) | (top <= low[1])
    if inside and free.all():
      return at_x, at_y
  return None


def _darker(colour: str) -> tuple[float, ...]:
  """The colour, no lighter than text on white may be."""
  rgb = np.asarray(matplotlib.colors.to_rgb(colour))
  luminance = rgb @ (0.2126, 0.7152, 0.0722)
  return tuple(rgb * min(1.0, 0.42 / luminance))


@matplotlib.rc_context(figures.STYLE)
def draw_alluvial(
  path: str | os.PathLike,
  stages: tuple[Sequence[str], Sequence[tuple[Sequence[str], int]]],
  *,
  most: int = 40,
) -> None:
  """Flows of branches through stages (classes → texts → labels), coloured by the last stage.

  Args:
    path: file name without a suffix.
    stages: the stage names, and for each branch its node names, one a stage, with its integer
      weight: `(["class", "text", "label"], [(("0", "I agree", "yes"), 2), …])`.
    most: a stage with more nodes draws those that agree in every other stage as one, and then the
      smallest of what is still too many as one more.

  Node names are cut at 28 characters. Characters that no font here can draw are written as the
  node's number in brackets; the description stored in both files says which text has which number.
  """
  names, flows = list(stages[0]), [(tuple(map(str, nodes)), int(w)) for nodes, w in stages[1]]
  if len(names) < 2 or not flows:
    raise ValueError("an alluvial figure needs at least two stages and one branch")
  if any(len(nodes) != len(names) or weight < 1 for nodes, weight in flows):
    raise ValueError("each branch needs one node for each stage and a weight of at least 1")
  titles = [f"{name} ({len(_weights(flows, stage))})" for stage, name in enumerate(names)]
  for stage in reversed(range(len(names))):
    flows = _merge_alike(flows, stage, most)
    flows = _merge_smallest(flows, stage, most)
  orders = _orders(flows, len(names))
  total = sum(weight for _, weight in flows)
  unit = ALLUVIAL_PT / total
  bars, height = _stack(flows, orders, unit)
  texts = {key: figures.one_line(key[1]) for key in bars}
  families, drawable = figures.typeface("".join([*titles, *texts.values()]))
  labels, numbered = {}, []
  for (stage, node), text in texts.items():
    shown = figures.replace_missing(text, drawable, f"[{len(numbered) + 1}]")
    if shown != text:
      numbered.append(text)
    count = sum(weight for nodes, weight in flows if nodes[stage] == node)
    labels[stage, node] = f"{figures.shorten(shown, 28)} · {count}"

  size = (2.9 * (len(names) - 1) + 3.4, (height + 62) / 72)
  figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
  axes = figure.add_subplot()
  bar = 0.007 * (len(names) - 1)  # half a node's width, where stages are 1 apart
  colours = {node: PALETTE[at % len(PALETTE)] for at, node in enumerate(orders[-1])}
  for left in range(len(names) - 1):
    for start, stop, thick, end in _bands(flows, orders, bars, left, unit):
      band = _band(left + bar, left + 1 - bar, start, stop, thick)
      style = dict(facecolor=colours[end], edgecolor=colours[end], alpha=0.45, lw=0.3)
      axes.add_patch(matplotlib.patches.PathPatch(band, **style))
  for (stage, node), (top, thick) in bars.items():
    colour = colours[node] if stage == len(names) - 1 else figures.INK
    corner = (stage - bar, top)
    axes.add_patch(matplotlib.patches.Rectangle(corner, 2 * bar, thick, color=colour, lw=0.3))
    side = -1 if stage == 0 else 1
    text = axes.text(
      stage + side * (bar + 0.015),
      top + thick / 2,
      labels[stage, node],
      ha="right" if stage == 0 else "left",
      va="center",
      fontsize=8,
      family=families,
      parse_math=False,
    )
    if 0 < stage < len(names) - 1:  # stands on the bands
      text.set_bbox(dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none", alpha=0.7))
  for stage, title in enumerate(titles):
    title = figures.replace_missing(title, drawable, f"[stage {stage}]")
    style = dict(ha="center", va="bottom", fontsize=10, family=families, parse_math=False)
    axes.text(stage, -14, title, **style)
  foot = f"heights are counts, {total} in all"
  if numbered:
    span = "[1]" if len(numbered) == 1 else f"[1] to [{len(numbered)}]"
    foot += f"\n{span}: characters that no font here draws"
  axes.text((len(names) - 1) / 2, height + 12, foot, ha="center", va="top", fontsize=8)
  axes.set(xlim=(-bar, len(names) - 1 + bar), ylim=(height + 12, -14))
  axes.set_axis_off()
  description = "; ".join(f"[{at}] {text}" for at, text in enumerate(numbered, start=1))
  figures.save_figure(figure, path, description)


def _weights(flows, stage: int) -> dict[str, int]:
  """Node → weight, in order of appearance."""
  weights = {}
  for nodes, weight in flows:
    weights[nodes[stage]] = weights.get(nodes[stage], 0) + weight
  return weights


def _merge_alike(flows, stage: int, most: int):
  """Where a stage has more than `most` nodes: one node for all that agree in every other stage."""
  if len(_weights(flows, stage)) <= most:
    return flows
  others = {}
  for nodes, _ in flows:
    others.setdefault(nodes[stage], set()).add(nodes[:stage] + nodes[stage + 1 :])
  groups = {}
  for node, ways in others.items():
    groups.setdefault(frozenset(ways), []).append(node)
  names = {}
  for first, *rest in groups.values():
    if rest:
      names |= dict.fromkeys([first, *rest], f"{figures.shorten(first, 14)} and {len(rest)} more")
  return _renamed(flows, stage, names)


def _merge_smallest(flows, stage: int, most: int):
  """Where a stage has more than `most` nodes: one node for the smallest."""
  falling = sorted(_weights(flows, stage).items(), key=lambda item: -item[1])
  rest = [node for node, _ in falling[most - 1 :]]
  return _renamed(flows, stage, dict.fromkeys(rest, f"{len(rest)} smaller")) if rest[1:] else flows


def _renamed(flows, stage: int, names: dict[str, str]):
  """The flows with the nodes of one stage renamed."""
  return [
    ((*nodes[:stage], names.get(nodes[stage], nodes[stage]), *nodes[stage + 1 :]), weight)
    for nodes, weight in flows
  ]


def _orders(flows, num_stages: int) -> list[list[str]]:
  """Each stage's nodes from top to bottom: the last by size, the others by where they lead."""
  orders = [[] for _ in range(num_stages)]
  for stage in reversed(range(num_stages)):
    weights = _weights(flows, stage)
    leads = dict.fromkeys(weights, 0.0)
    if stage + 1 < num_stages:
      for nodes, weight in flows:
        share = weight / weights[nodes[stage]]
        leads[nodes[stage]] += share * orders[stage + 1].index(nodes[stage + 1])
    orders[stage] = sorted(weights, key=lambda node: (round(leads[node], 9), -weights[node]))
  return orders


def _stack(flows, orders, unit: float):
  """(stage, node) → (top, height) of its bar, and the height of the tallest stage, in points."""
  heights = [
    {node: weight * unit for node, weight in _weights(flows, stage).items()}
    for stage in range(len(orders))
  ]
  # A node has room for its label at least.
  rooms = [{node: max(h, LINE_PT) for node, h in stage.items()} for stage in heights]
  height = max(sum(room.values()) + 4 * (len(room) - 1) for room in rooms)
  bars = {}
  for stage, order in enumerate(orders):
    free = height - sum(rooms[stage].values())
    gap = min(20.0, free / max(1, len(order) - 1))
    at = (free - gap * (len(order) - 1)) / 2
    for node in order:
      thick = heights[stage][node]
      bars[stage, node] = (at + (rooms[stage][node] - thick) / 2, thick)
      at += rooms[stage][node] + gap
  return bars, height


def _bands(flows, orders, bars, left: int, unit: float):
  """Yields (y at stage `left`, y at the next, thickness, last node) of each band."""
  ranks = [{node: at for at, node in enumerate(order)} for order in orders]
  weights = {}
  for nodes, weight in flows:
    key = (nodes[left], nodes[left + 1], nodes[-1])
    weights[key] = weights.get(key, 0) + weight

  def rank(key):
    return ranks[left][key[0]], ranks[left + 1][key[1]], ranks[-1][key[2]]

  filled = {}  # node → how far down its bar is taken
  starts, stops = {}, {}
  for key in sorted(weights, key=rank):
    starts[key] = filled.get((left, key[0]), bars[left, key[0]][0])
    filled[left, key[0]] = starts[key] + weights[key] * unit
  for key in sorted(weights, key=lambda key: (rank(key)[1], rank(key)[0], rank(key)[2])):
    stops[key] = filled.get((left + 1, key[1]), bars[left + 1, key[1]][0])
    filled[left + 1, key[1]] = stops[key] + weights[key] * unit
    yield starts[key], stops[key], weights[key] * unit, key[2]


def _band(x0: float, x1: float, start: float, stop: float, thick: float) -> matplotlib.path.Path:
  """A band of constant thickness from (x0, start) to (x1, stop), level at both ends."""
  middle = (x0 + x1) / 2
  upper = [(x0, start), (middle, start), (middle, stop), (x1, stop)]
  lower = [(x, y + thick) for x, y in reversed(upper)]
  move, line, curve = (getattr(matplotlib.path.Path, c) for c in ("MOVETO", "LINETO", "CURVE4"))
  codes = [move, curve, curve, curve, line, curve, curve, curve, matplotlib.path.Path.CLOSEPOLY]
  return matplotlib.path.Path([*upper, *lower, upper[0]], codes)


@matplotlib.rc_context(figures.STYLE)
def draw_axes(path: str | os.PathLike, rows: Sequence[dict]) -> None:
  """Shares of trajectories that diverge in routes and in tokens, on the two axes, by scheme.

  Args:
    path: file name without a suffix.
    rows: dicts with `scheme`, `axis` ("native" or "canonical") and the integers `routes`, `tokens`
      and `total`; one for each scheme and axis, a missing one leaves a gap. The counts are written
      on the bars, the totals under the schemes.
  """
  cells = {}
  for row in rows:
    key = row["axis"], row["scheme"]
    if row["axis"] not in AXES or key in cells:
      raise ValueError(f"expected one row for each scheme on the axes {list(AXES)}, got {key}")
    if row["total"] < 1 or not all(0 <= row[what] <= row["total"] for what in MEASURES):
      raise ValueError(f"counts of {key} must lie between 0 and a total of at least 1, got {row}")
    cells[key] = row
  if not cells:
    raise ValueError("a figure of divergence needs at least one row, got none")
  found = list(dict.fromkeys(scheme for _, scheme in cells))
  schemes = [s for s in SCHEMES if s in found] + [s for s in found if s not in SCHEMES]
  size = (2.2 + 1.5 * max(2, len(schemes)), 3.6)
  figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
  for axes, axis in zip(figure.subplots(1, 2, sharey=True), AXES):
    shown = [(at, cells[axis, s]) for at, s in enumerate(schemes) if (axis, s) in cells]
    for offset, what, colour in zip((-0.2, 0.2), MEASURES, (PALETTE[0], PALETTE[1])):
      heights = [100 * row[what] / row["total"] for _, row in shown]
      bars = axes.bar([at + offset for at, _ in shown], heights, 0.36, color=colour, label=what)
      axes.bar_label(bars, [str(row[what]) for _, row in shown], fontsize=8, padding=2)
    totals = {at: f"\nof {row['total']}" for at, row in shown}
    axes.set_xticks(
      range(len(schemes)), [s + totals.get(at, "\n–") for at, s in enumerate(schemes)]
    )
    axes.tick_params(axis="x", length=0)
    axes.set_title(AXES[axis], fontsize=9)
    axes.set(xlim=(-0.6, len(schemes) - 0.4), ylim=(0, 108), yticks=range(0, 101, 25))
  figure.axes[0].set_ylabel("trajectories that diverge (%)")
  figure.legend(
    figure.axes[0].containers, MEASURES, loc="outside upper left", ncols=2, handlelength=1.2
  )
  figures.save_figure(figure, path)


@matplotlib.rc_context(figures.STYLE)
def draw_first_change(
  path: str | os.PathLike,
  first_change: np.ndarray,
  *,
  layers: Sequence[int],
  tokens: Sequence[int | str],
) -> None:
  """Where the first changed bit appears, as a heat map of counts of branches.

  Args:
    path: file name without a suffix.
    first_change: int [layer, token] of counts; each is written in its cell up to 200 cells.
    layers: the names of the rows, from the bottom up.
    tokens: the names of the columns.
  """
  counts = np.asarray(first_change)
  if counts.ndim != 2 or not counts.size:
    raise ValueError(f"first_change must be a filled [layer, token] array, got {counts.shape}")
  if counts.shape != (len(layers), len(tokens)):
    raise ValueError(
      f"first_change {counts.shape} does not fit {len(layers)} layers and {len(tokens)} tokens"
    )
  if counts.dtype.kind not in "iu" or counts.min() < 0:
    raise ValueError("first_change must hold integer counts of at least 0")
  texts = [figures.one_line(str(token)) for token in tokens]
  families, drawable = figures.typeface("".join(texts))
  shown = [figures.replace_missing(text, drawable, f"[{at}]") for at, text in enumerate(texts)]
  columns = [figures.shorten(text, 12) for text in shown]
  num_layers, num_tokens = counts.shape
  written = counts.size <= 200
  # A column is as wide as its widest count, where counts are written; a row, as high as a line.
  column = max(22.0, DIGIT_PT * len(str(counts.max())) + 8) if written else 12.0
  width, height = np.clip(column * num_tokens, 200, 800), np.clip(16.0 * num_layers, 150, 620)
  size = ((width + 150) / 72, (height + 70) / 72)
  figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
  axes = figure.add_subplot()
  positive = counts[counts > 0]
  decades = positive.size > 0 and positive.max() > 10 * positive.min()
  scale = matplotlib.colors.LogNorm if decades else matplotlib.colors.Normalize
  norm = scale(vmin=1, vmax=max(2, counts.max()))
  mesh = axes.pcolormesh(
    np.ma.masked_equal(counts, 0),
    norm=norm,
    cmap=matplotlib.colors.LinearSegmentedColormap.from_list("counts", HEAT),
    edgecolor="white" if written else "face",
    linewidth=0.5,
    rasterized=counts.size > 5000,
  )
  axes.set_facecolor("#F7F7F7")  # a cell where no branch changes first
  if written:
    for (layer, token), count in np.ndenumerate(counts):
      ink = figures.GREY if not count else "white" if norm(count) > 0.55 else figures.INK
      at = (token + 0.5, layer + 0.5)
      axes.text(*at, str(count), ha="center", va="center", fontsize=8, color=ink)
  steep = DIGIT_PT * max(map(len, columns)) > min(width / num_tokens, 40.0)
  room = LINE_PT if steep else DIGIT_PT * max(map(len, columns)) + 4
  every = int(np.ceil(room * num_tokens / width))
  axes.set_xticks(
    np.arange(0, num_tokens, every) + 0.5,
    columns[::every],
    rotation=90 if steep else 0,
    family=families,
    parse_math=False,
  )
  every = int(np.ceil(LINE_PT * num_layers / height))
  axes.set_yticks(np.arange(0, num_layers, every) + 0.5, [str(x) for x in layers[::every]])
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)
  axes.set(xlabel="token", ylabel="layer")
  bar = figure.colorbar(mesh, label=f"branches, {counts.sum()} in all", aspect=30)
  bar.outline.set_visible(False)
  bar.ax.minorticks_off()
  bar.ax.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
  if not decades:
    bar.ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
  description = "; ".join(f"[{at}] {text}" for at, text in enumerate(texts) if shown[at] != text)
  figures.save_figure(figure, path, description)
