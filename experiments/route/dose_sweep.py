"""The routed fraction against the dose: 8 bits to 2, and half the strength of 4.

    python -m experiments.route.dose_sweep --model=olmoe-nano --out=out/route

A dose is excess over that of 4 bits at strength 1 on the same model. dose_sweep.tsv,
dose_summary.tsv, dose.svg. One and a half minutes for a nano model.
"""

from experiments.route import study as studies
from experiments.route.measure import estimate
from moejax.analysis import dose as doses
from moejax.inference import FourRun, KvQuantization
from moejax.report import route_figures
from moejax.report import route_tables as tables

TABLES = (tables.DOSE_SWEEP, tables.DOSE_SUMMARY)
POINTS = (*(KvQuantization(bits) for bits in (8, 6, 5, 4, 3, 2)), KvQuantization(4, 0.5))


def run(study: studies.Study) -> list[str]:
  """Writes tables and a figure; returns what to say."""
  found = sweep(study)
  rows = [row for row, _ in found]
  study.write(tables.DOSE_SWEEP, rows, "dose_sweep")
  summary = summarise(study, found)
  study.write(tables.DOSE_SUMMARY, [summary], "dose_sweep")
  if any(row["dose"] is not None and row["dose"] > 0 for row in rows):
    route_figures.draw_dose_curve(study.out / "dose", [point(row) for row in rows])
  if summary["peak_dose"] is None:
    return ["dose sweep: RMF NOT INTERPRETABLE at every dose"]
  crossing = summary["crossover_dose"]
  return [
    f"dose sweep: RMF peaks at {summary['peak_rmf']:.2f}, dose {summary['peak_dose']:.1f}; the "
    "direct channel overtakes " + ("nowhere" if crossing is None else f"at dose {crossing:.1f}")
  ]


def sweep(study: studies.Study) -> list[tuple[dict, FourRun]]:
  """Rows and runs by rising dose."""
  found = [(d, *study.contrasts(d)) for d in study.progress(POINTS, "doses")]
  unit = next(row["excess_total"] for d, row, _ in found if d == KvQuantization(4))
  out = []
  for disturbance, row, four in found:
    dose = row["excess_total"] / unit if unit > 0 else None
    matched = None if dose is None else bool(doses.matched(dose))
    more = dict(bits=disturbance.bits, strength=disturbance.strength, dose=dose, matched=matched)
    out.append((row | more, four))
  return sorted(out, key=lambda pair: pair[0]["excess_total"])


def summarise(study: studies.Study, found: list[tuple[dict, FourRun]]) -> dict:
  """Peak, crossover, and whether the fraction falls behind the peak."""
  usable = [pair for pair in found if pair[0]["interpretable"] and pair[0]["dose"] is not None]
  nothing = dict.fromkeys(
    ("peak_dose", "peak_rmf", "crossover_dose", "direct_factor", "routed_factor")
  )
  summary = nothing | estimate("decline", None)
  summary["paper"] = "peak 0.58 at dose 5.4, decline 0.0339 [0.0210, 0.0464] by dose 11.7 (OLMoE)"
  if not usable:
    return summary
  rows = [row for row, _ in usable]
  at = doses.peak([row["rmf"] for row in rows])
  direct = [row["excess_compute"] for row in rows]
  routed = [row["route_forward"] for row in rows]
  summary |= dict(peak_dose=rows[at]["dose"], peak_rmf=rows[at]["rmf"])
  step = doses.crossover(direct, routed)
  if step is not None:
    summary |= dict(
      crossover_dose=rows[step + 1]["dose"],
      direct_factor=direct[step + 1] / direct[step],
      routed_factor=routed[step + 1] / routed[step],
    )
  if at < len(rows) - 1:
    top, last = usable[at][1], usable[-1][1]
    parts = (top.route_forward, top.total, last.route_forward, last.total)
    sums = [part.sum(axis=1) for part in parts]
    summary |= estimate("decline", doses.paired_decline(*sums, seed=study.seed))
  return summary


def point(row: dict) -> dict:
  """A row as the figure wants it."""
  strength = "" if row["strength"] == 1 else f" ×{row['strength']:g}"
  return dict(row, label=f"{row['bits']} bit{strength}")


if __name__ == "__main__":
  studies.main(run)
