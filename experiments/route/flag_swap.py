"""One checkpoint, norm_topk_prob as it is and as it is not: what the convention does to damage.

    python -m experiments.route.flag_swap --model=olmoe-nano --out=out/route

The swapped run is off the model's own distribution: read that recovery persists, not its size.
flag_swap.tsv. Half a minute for a nano model.
"""

import dataclasses

import numpy as np

from experiments.route import study as studies
from experiments.route.measure import estimate, mean_of, share_of
from moejax.inference import four_run, FourRun, run_routed
from moejax.inference.routed import ROWS
from moejax.report import route_tables as tables

TABLES = (tables.FLAG_SWAP,)


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  model = study.model
  config = dataclasses.replace(model.config, norm_topk_prob=not model.config.norm_topk_prob)
  swapped = dataclasses.replace(model, config=config, module=model.module.clone(config=config))
  rows = []
  for one in study.progress((model, swapped), "flag swap"):
    four = study.four
    if one is swapped:
      four = four_run(
        one,
        study.tokens,
        study.disturbance,
        mode=study.mode,
        prefill=study.prefill,
        controls=ROWS,
      )
    rows.append(measure(study, one, four))
  ceilings = {row["norm_topk_prob"]: row["routed_ceiling"] for row in rows}
  ratio = ceilings[False] / ceilings[True] if min(ceilings.values()) > 0 else None
  study.write(tables.FLAG_SWAP, [dict(row, damage_ratio=ratio) for row in rows], "flag_swap")
  recoveries = (
    "none" if row["full_recovery"] is None else f"{row['full_recovery']:.2f}" for row in rows
  )
  said = "no ratio" if ratio is None else f"{ratio:.1f} times"
  return [
    f"flag swap: full-decode recovery native {next(recoveries)}, forced {next(recoveries)}; routed "
    f"damage without normalisation over with it: {said}"
  ]


def measure(study: studies.Study, model, four: FourRun) -> dict:
  """Columns of one setting."""
  condition = study.disturbance.condition(model, study.mode, *study.tokens.shape)
  prefix = (np.arange(study.length - 1) < study.prefill)[None, None]
  pinned = run_routed(model, study.tokens, condition, four.cc.pins(prefix), prefill=study.prefill)
  recovered = four.qf.nll.astype(np.float64) - pinned.nll
  native, controls = model is study.model, four.controls
  return dict(
    norm_topk_prob=model.config.norm_topk_prob,
    native=native,
    control=max(controls.clean_pinned, controls.disturbed_pinned, controls.idle or 0.0),
    clean_nll=float(four.cc.nll.mean(dtype=np.float64)),
    **estimate("excess_total", mean_of(four.total, study.seed)),
    **estimate("routed_ceiling", mean_of(four.route_forward, study.seed)),
    **estimate("full_recovery", share_of(four.route_forward, four.total, study.seed)),
    **estimate("prefix_recovery", share_of(recovered, four.total, study.seed)),
    paper=study.paper("flag_swap", "native" if native else "forced", "full_recovery"),
  )


if __name__ == "__main__":
  studies.main(run)
