"""One persistent B schedule, stage by stage: where a reduction becomes a state, a route and a text.

    python -m experiments.reduction.propagation_trace --model=dsv4-nano --out=out/reduction

"why the sheep", request seed 0; propagation_trace.tsv. The layers are the first routed layer whose
next layer has a learned router, and that one (2 and 3 in the paper). Half a minute.
"""

import itertools

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import schedule_runs
from experiments.reduction import study as studies
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  prompt = (study.prompts or prompt_sets.DEPTH)[0]
  logits, stages = schedule_runs.last_position(study, prompt, study.scheme, 1)
  group = schedule_runs.run_group(study, prompt, study.scheme, 1)
  rows = [
    dict(prompt=prompt.id, scheme=study.scheme.name, request=0, paper=_paper(row["stage"]), **row)
    for row in stage_rows(study, logits, stages, group)
  ]
  study.write(tables.PROPAGATION, rows, "propagation_trace")
  return [
    f"{row['stage']}: {'equal' if row['equal'] else 'differs'}"
    + ("" if row["linf"] is None else f", largest difference {row['linf']:.6g}")
    for row in rows
  ]


def layers(study: studies.Study) -> tuple[int, int]:
  """(a routed layer, the next one, whose router is learned); refuses a model without."""
  config = study.model.config
  for a, b in itertools.pairwise(config.moe_layers):
    if b == a + 1 and b in config.router_layers:
      return a, b
  raise ValueError(
    f"propagation_trace: {study.model.name} has no two routed layers in a row, the second with a "
    "learned router."
  )


def stage_rows(study: studies.Study, logits, stages, group: schedule_runs.Group) -> list[dict]:
  """Stages in the order in which a difference passes them; rows of native and of the schedule."""
  pair = [schedule_runs.NATIVE, schedule_runs.FIRST_SCHEDULE]
  moe, router = layers(study)
  sets = [stages["ids"][router, row] for row in pair]
  margins = [float(stages["margins"][router, row]) for row in pair]
  top = [np.sort(logits[row])[::-1] for row in pair]
  argmax = [int(logits[row].argmax()) for row in pair]
  tokens = [group.tokens[row] for row in pair]
  changed = np.flatnonzero(tokens[0] != tokens[1])
  first = int(changed[0]) if len(changed) else None
  token = ["none" if first is None else f"ordinal {first + 1}: token {t[first]}" for t in tokens]
  return [
    _vectors("moe_output", moe, *stages["combined"][moe, pair]),
    _vectors("post_mhc", moe, *stages["post_block"][moe, pair]),
    _vectors("router_scores", router, *stages["router_logits"][router, pair]),
    _texts("router_set", router, *(studies.ids(x) for x in sets)),
    _texts("router_margin", router, *(f"{x:.9g}" for x in margins)),
    _vectors("lm_logits", None, *logits[pair]),
    _texts("lm_argmax", None, *map(str, argmax)),
    _texts("lm_margin", None, *(f"{x[0] - x[1]:.9g}" for x in top)),
    _texts("first_changed_token", None, *token),
    _texts("continuation", None, *map(study.text, tokens)),
  ]


def _vectors(stage: str, layer: int | None, native: np.ndarray, branch: np.ndarray) -> dict:
  equal = native.tobytes() == branch.tobytes()
  linf = float(np.abs(native - branch).max())
  return dict(stage=stage, layer=layer, equal=equal, linf=linf, native=None, branch=None)


def _texts(stage: str, layer: int | None, native: str, branch: str) -> dict:
  # Escaped by `repr`: a continuation may hold line breaks.
  quote = (lambda text: repr(text)) if stage == "continuation" else str
  values = dict(native=quote(native), branch=quote(branch))
  return dict(stage=stage, layer=layer, equal=native == branch, linf=None, **values)


def _paper(stage: str) -> str:
  return paper_figures.beside("propagation_trace", stage, "linf")


if __name__ == "__main__":
  studies.main(run)
