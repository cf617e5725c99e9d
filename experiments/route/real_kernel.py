"""A packed cache instead of a simulated one: int4, int3, int2, and int4 with exact newest tokens.

    python -m experiments.route.real_kernel --model=olmoe-nano --out=out/route

Each beside the band that the simulated dose curve gives at the damage it does. real_kernel.tsv.
Two minutes for a nano model, and those of the dose sweep where that has not run.
"""

import jax

from experiments.route import dose_sweep
from experiments.route import study as studies
from experiments.route.measure import describe
from moejax.analysis import dose as doses
from moejax.inference import PackedKv
from moejax.inference.batches import state_length
from moejax.models import Mode
from moejax.report import paper_figures, route_figures
from moejax.report import route_tables as tables

TABLES = (tables.REAL_KERNEL,)
WINDOW = 128  # the default of transformers' quantised cache


def run(study: studies.Study) -> list[str]:
  """Writes the table and the dose curve with it; returns what to say."""
  curve = [row for row, _ in dose_sweep.sweep(study)]
  unit = next(row["excess_total"] for row in curve if row["disturbance"] == "kv4")
  known = [row for row in curve if row["interpretable"] and row["dose"] is not None]
  rows = []
  for point in study.progress(points(study), "packed caches"):
    row, _ = study.contrasts(point)
    dose = row["excess_total"] / unit if unit > 0 else None
    rows.append(row | columns(study, point) | dict(dose=dose) | predicted(known, dose, row["rmf"]))
  study.write(tables.REAL_KERNEL, rows, "real_kernel")
  drawn = [dict(row, label=row["disturbance"]) for row in rows if row["dose"] is not None]
  if any(row["dose"] is not None and row["dose"] > 0 for row in curve):
    simulated = [dose_sweep.point(row) for row in curve]
    route_figures.draw_dose_curve(study.out / "dose", simulated, drawn)
  return [f"packed cache, {row['disturbance']}: {describe(row)}" for row in rows]


def points(study: studies.Study) -> list[PackedKv]:
  """DeepSeek-V4 has a window of its own, and takes no other."""
  found = [PackedKv(bits, prefill=study.prefill) for bits in (4, 3, 2)]
  if study.model.family != "deepseek_v4":
    found.append(PackedKv(4, WINDOW, study.prefill))
  return found


def columns(study: studies.Study, point: PackedKv) -> dict:
  """What the packed state is, and holds."""
  mode = point.condition(study.model, study.mode, 1, study.length).mode
  return dict(
    bits=point.bits,
    group=min(mode.packed_kv.group, study.model.config.head_dim),
    window=point.window,
    cache_bytes=cache_bytes(study, mode),
    plain_bytes=cache_bytes(study, study.mode),
    paper=paper_figures.beside("real_kernel", f"olmoe/int{point.bits}", "rmf", study="route"),
  )


def cache_bytes(study: studies.Study, mode: Mode) -> int:
  """Of the persistent state of one sequence, measured on its arrays."""
  state = study.model.init_state(1, state_length(study.length - 1), mode)
  return sum(x.nbytes for x in jax.tree.leaves(state.layers))


def predicted(curve: list[dict], dose: float | None, rmf: float | None) -> dict:
  """The band of the curve at a dose, and whether the fraction lies in it."""
  low = high = None
  if dose is not None and curve:
    at = [row["dose"] for row in curve]
    low, high = (
      doses.interpolate(at, [row[name] for row in curve], dose) for name in ("rmf_low", "rmf_high")
    )
  inside = None if low is None or rmf is None else bool(low <= rmf <= high)
  return dict(predicted_low=low, predicted_high=high, in_band=inside)


if __name__ == "__main__":
  studies.main(run)
