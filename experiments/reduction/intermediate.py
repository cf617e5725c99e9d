"""Scheme C inside: MoE outputs, states, router scores and logits of every schedule against native.

    python -m experiments.reduction.intermediate --model=dsv4-nano --out=out/reduction

Three prompts, 64 schedules, last prompt position, every routed layer; c_intermediate_summary.tsv.
Half a minute for a nano model.
"""

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import schedule_runs
from experiments.reduction import study as studies
from moejax import combine
from moejax.report import reduction_tables as tables

_COLUMNS = dict(combined="moe_linf", post_block="post_mhc_linf", router_logits="router_linf")


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  rows = []
  for prompt in study.progress(study.prompts or prompt_sets.DEPTH, "C intermediates"):
    requests = schedule_runs.REQUESTS
    logits, stages = schedule_runs.last_position(study, prompt, combine.C, requests)
    values = {name: stages[name][list(study.model.config.moe_layers)] for name in _COLUMNS}
    values = {name: np.moveaxis(x, 1, 0) for name, x in values.items()} | {"lm": logits}
    native = {name: x[schedule_runs.NATIVE] for name, x in values.items()}
    schedules = {name: x[schedule_runs.FIRST_SCHEDULE :] for name, x in values.items()}
    linf = {name: float(np.abs(x - native[name][None]).max()) for name, x in schedules.items()}
    equal = [
      all(x[row].tobytes() == native[name].tobytes() for name, x in schedules.items())
      for row in range(requests)
    ]
    captured = sum(len(x) for x in schedules.values())
    proved = schedule_runs.certified(study, study.encode(prompt), combine.C)
    rows.append(
      dict(
        prompt=prompt.id,
        schedules=requests,
        records=captured,
        missing=requests * len(schedules) - captured,
        **{column: linf[name] for name, column in _COLUMNS.items()},
        lm_linf=linf["lm"],
        equal=sum(equal),
        certified=bool(proved.all()),
      )
    )
  study.write(tables.C_INTERMEDIATE, rows, "intermediate")
  equal, total = (sum(row[name] for row in rows) for name in ("equal", "schedules"))
  return [f"C inside: {equal} of {total} schedules equal native in every captured value"]


if __name__ == "__main__":
  studies.main(run)
