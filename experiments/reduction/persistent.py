"""Layer-static schedules: every combine of a request in a random order of its own, in each scheme.

    python -m experiments.reduction.persistent --model=dsv4-nano --out=out/reduction

Three prompts, 64 request seeds, four schemes, eight tokens: 768 trajectories, their identity orders
and three native baselines. persistent_trajectories.tsv, persistent_ablation.tsv, figures/axes.*,
figures/first_bit.* and first_route.* (where a trajectory's MoE output, and its expert set, first is
another one). A killed run goes on with --resume. About a minute for a nano model.
"""

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import schedule_runs
from experiments.reduction import study as studies
from moejax import combine
from moejax.analysis import tokens_sha256
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables
from moejax.report.reduction_figures import draw_axes, draw_first_change

SCHEMES = (combine.P32, combine.C, combine.A, combine.B)


def run(study: studies.Study) -> list[str]:
  """Writes the tables; returns what to say."""
  rows = study.read(tables.TRAJECTORIES)
  done = {(row["prompt"], row["scheme"]) for row in rows}
  chosen = study.prompts or prompt_sets.DEPTH
  pairs = [(prompt, scheme) for prompt in chosen for scheme in SCHEMES]
  for prompt, scheme in study.progress(pairs, "persistent schedules"):
    if (prompt.id, scheme.name) not in done:
      rows += trajectory_rows(study, prompt, scheme)
      study.write(tables.TRAJECTORIES, rows, "persistent")
  summary = ablation_rows(rows, [prompt.id for prompt in chosen])
  study.write(tables.PERSISTENT, summary, "persistent")
  draw(study, rows, summary)
  return [
    f"persistent, {row['scheme']}: of {row['schedules']} schedules {row['native_routes']} change "
    f"routes and {row['native_tokens']} tokens against native, {row['canonical_routes']} and "
    f"{row['canonical_tokens']} against the identity order"
    for row in summary
    if row["prompt"] == "all"
  ]


def trajectory_rows(study: studies.Study, prompt, scheme: combine.Contract) -> list[dict]:
  """Of a prompt under a scheme; the native baseline comes with the first scheme."""
  group = schedule_runs.run_group(study, prompt, scheme, schedule_runs.REQUESTS)
  native = [*study.encode(prompt), *group.tokens[schedule_runs.NATIVE][:-1].tolist()]
  proved = schedule_runs.certified(study, native, scheme)
  differ = group.routes_differ(schedule_runs.NATIVE)
  rows = []
  for row, tokens in enumerate(group.tokens):
    kind = {schedule_runs.NATIVE: "native", schedule_runs.IDENTITY: "identity"}.get(row, "schedule")
    if kind == "native" and scheme is not SCHEMES[0]:
      continue
    rows.append(
      dict(
        prompt=prompt.id,
        scheme="native" if kind == "native" else scheme.name,
        kind=kind,
        request=row - schedule_runs.FIRST_SCHEDULE if kind == "schedule" else -1,
        tokens=studies.ids(tokens),
        tokens_sha256=tokens_sha256(tokens),
        routes_sha256=group.routes_sha256(row),
        routes_like_native=not differ[row],
        first_bit=group.first_bit(row),
        first_route=group.first_route(row),
        combines=proved.size,
        certified=int(proved.sum()),
      )
    )
  return rows


def draw(study: studies.Study, rows: list[dict], summary: list[dict]) -> None:
  """The two axes; where outputs and expert sets of all schedules first change."""
  bars = [
    dict(
      scheme=row["scheme"],
      axis=axis,
      routes=row[f"{axis}_routes"],
      tokens=row[f"{axis}_tokens"],
      total=row["schedules"],
    )
    for row in summary
    if row["prompt"] == "all"
    for axis in ("native", "canonical")
  ]
  draw_axes(study.out / "figures" / "axes", bars)
  for name in ("first_bit", "first_route"):
    cells = [row[name] for row in rows if row["kind"] == "schedule" and row[name]]
    at = np.array([[int(x) for x in cell.split(":")] for cell in cells], int).reshape(-1, 2)
    counts = np.zeros((study.model.config.num_layers, at[:, 0].max(initial=0) + 1), int)
    np.add.at(counts, (at[:, 1], at[:, 0]), 1)
    names = dict(layers=range(counts.shape[0]), tokens=range(counts.shape[1]))
    draw_first_change(study.out / "figures" / name, counts, **names)


def ablation_rows(rows: list[dict], prompts: list[str]) -> list[dict]:
  """Of persistent_ablation, counted from trajectories: per prompt, then of all."""
  out = []
  for scheme in (scheme.name for scheme in SCHEMES):
    parts = [_counts([row for row in rows if row["prompt"] == p], scheme) for p in prompts]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    for prompt, counts in [*zip(prompts, parts), ("all", total)]:
      out.append(dict(prompt=prompt, scheme=scheme, **counts, **_paper(prompt, scheme)))
  return out


def _counts(rows: list[dict], scheme: str) -> dict[str, int]:
  native = next(row for row in rows if row["kind"] == "native")
  mine = [row for row in rows if row["scheme"] == scheme]
  identity = next(row for row in mine if row["kind"] == "identity")
  schedules = [row for row in mine if row["kind"] == "schedule"]
  unlike = lambda other, name: sum(row[name] != other[name] for row in schedules)
  return dict(
    schedules=len(schedules),
    native_routes=unlike(native, "routes_sha256"),
    native_tokens=unlike(native, "tokens_sha256"),
    canonical_routes=unlike(identity, "routes_sha256"),
    canonical_tokens=unlike(identity, "tokens_sha256"),
    unique_continuations=len({row["tokens_sha256"] for row in schedules}),
  )


def _paper(prompt: str, scheme: str) -> dict[str, str]:
  texts = {p.id: p.text for p in prompt_sets.DEPTH}
  key = f"{texts.get(prompt, prompt)}/{scheme}"
  find = lambda column: paper_figures.beside("persistent_ablation", key, column)
  return dict(paper_native_routes=find("native_routes"), paper_native_tokens=find("native_tokens"))


if __name__ == "__main__":
  studies.main(run)
