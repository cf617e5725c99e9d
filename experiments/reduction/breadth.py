"""Breadth: for 50 prompts the branch with the farthest state, and how long its text stays native.

    python -m experiments.reduction.breadth --model=dsv4-nano --out=out/reduction

One fork per prompt; horizons 8, 16, 32, survivors only go on. breadth_branches.tsv,
breadth_summary.tsv. A killed run goes on with --resume. Two minutes for a nano
model.
"""

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import study as studies
from moejax.analysis import breadth
from moejax.inference import continue_forked, fork
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables

_CHOSEN = ("layer", "scheme", "branch", "order", "classes", "states", "state_linf")


def run(study: studies.Study) -> list[str]:
  """Writes the tables; returns what to say."""
  prompts = study.prompts or prompt_sets.BREADTH
  horizons = studies.horizons(study, breadth.HORIZONS)
  rows = study.read(tables.BREADTH_BRANCHES)
  rows = first_stage(study, prompts, horizons[0], rows)
  for horizon in horizons[1:]:
    rows = next_stage(study, prompts, horizon, rows)
  followed = follow(prompts, rows, horizons)
  summary = summary_rows(followed)
  study.write(tables.BREADTH, summary, "breadth")
  totals = [row for row in summary if row["by"] == "all"]
  unlike = sum(row["states_unlike_native"] for row in rows if row["horizon"] == horizons[0])
  every = sum(row["classes"] for row in rows if row["horizon"] == horizons[0])
  counts = ", ".join(f"{row['cumulative']} by {row['horizon']} tokens" for row in totals)
  return [
    f"breadth: of {len(prompts)} prompts separated {counts}; {unlike} of {every} branch states "
    "unlike native"
  ]


def first_stage(study: studies.Study, prompts, horizon: int, rows: list[dict]) -> list[dict]:
  """Chooses the branch of every prompt, then runs those that have no row yet."""
  done = {row["prompt"] for row in rows if row["horizon"] == horizon}
  for prompt in study.progress(prompts, "breadth, branches"):
    if prompt.id not in done:
      chosen = choose(study, prompt)
      rows = rows + run_stage(study, [prompt], horizon, [chosen])
      study.write(tables.BREADTH_BRANCHES, rows, "breadth")
  return rows


def next_stage(study: studies.Study, prompts, horizon: int, rows: list[dict]) -> list[dict]:
  """Runs the prompts that no earlier horizon has separated, all at once."""
  done = {row["prompt"] for row in rows if row["horizon"] == horizon}
  gone = {row["prompt"] for row in rows if row["horizon"] < horizon and row["separated"]}
  left = [p for p in prompts if p.id not in gone | done]
  if not left:
    return rows
  chosen = [next(row for row in rows if row["prompt"] == prompt.id) for prompt in left]
  rows = rows + run_stage(study, left, horizon, chosen)
  study.write(tables.BREADTH_BRANCHES, rows, "breadth")
  return rows


def choose(study: studies.Study, prompt) -> dict:
  """The class with the farthest post-mHC state, and what there was to choose from."""
  event = study.freeze(prompt)
  key = study.key(study.scheme.code)
  found = fork(study.model, event, study.scheme, key=key, mode=study.mode)
  branch = found.farthest()
  return dict(
    layer=event.layer,
    scheme=study.scheme.name,
    branch=branch,
    order=studies.ids(found.orders[branch]),
    classes=len(found.orders),
    states=found.num_states,
    states_unlike_native=int(found.unlike_native.sum()),
    state_linf=float(found.state_linf[found.output[branch]]),
  )


def run_stage(study: studies.Study, prompts, horizon: int, chosen: list[dict]) -> list[dict]:
  """Rows of breadth_branches at a horizon."""
  orders = np.array([studies.parse_ids(choice["order"]) for choice in chosen], np.int32)
  ids = [study.encode(prompt) for prompt in prompts]
  native, branch = continue_forked(
    study.model, ids, study.fork_layer, orders, study.scheme, horizon, mode=study.mode
  )
  names = (*_CHOSEN, "states_unlike_native")
  return [
    dict(
      prompt=prompt.id,
      horizon=horizon,
      separated=bool((a != b).any()),
      native_tokens=studies.ids(a),
      branch_tokens=studies.ids(b),
      **{name: choice[name] for name in names},
    )
    for prompt, choice, a, b in zip(prompts, chosen, native, branch)
  ]


def follow(prompts, rows: list[dict], horizons) -> list[breadth.Stage]:
  """The cohort through its horizons."""
  cohort = [breadth.Prompt(p.id, p.language, p.kind) for p in prompts]
  found = [breadth.Row(row["prompt"], row["horizon"], row["separated"]) for row in rows]
  return breadth.stages(cohort, found, horizons)


def summary_rows(followed: list[breadth.Stage]) -> list[dict]:
  """Of breadth_summary."""
  return [
    dict(
      **count._asdict(),
      paper_cumulative=paper_figures.beside(
        "breadth_summary", f"{count.horizon}/{count.group}", "cumulative"
      ),
    )
    for count in breadth.counts(followed)
  ]


if __name__ == "__main__":
  studies.main(run)
