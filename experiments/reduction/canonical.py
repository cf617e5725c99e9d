"""The identity order in every scheme: what the scheme changes before any order does.

    python -m experiments.reduction.canonical --model=dsv4-nano --out=out/reduction

Three prompts, four schemes, eight tokens; canonical_reference.tsv. Half a minute for a nano model.
"""

from configs import prompts as prompt_sets
from experiments.reduction import schedule_runs
from experiments.reduction import study as studies
from experiments.reduction.persistent import SCHEMES
from moejax.analysis import tokens_sha256
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  chosen = study.prompts or prompt_sets.DEPTH
  pairs = [(prompt, scheme) for scheme in SCHEMES for prompt in chosen]
  rows = []
  for prompt, scheme in study.progress(pairs, "canonical references"):
    group = schedule_runs.run_group(study, prompt, scheme, requests=0)
    tokens = group.tokens[schedule_runs.IDENTITY]
    paper = paper_figures.beside("canonical_reference", scheme.name, "native_tokens")
    rows.append(
      dict(
        prompt=prompt.id,
        scheme=scheme.name,
        routes_differ=bool(group.routes_differ(schedule_runs.NATIVE)[schedule_runs.IDENTITY]),
        tokens_differ=bool(group.tokens_differ(schedule_runs.NATIVE)[schedule_runs.IDENTITY]),
        tokens_sha256=tokens_sha256(tokens),
        text=study.text(tokens),
        paper_tokens_differ=paper,
      )
    )
  study.write(tables.CANONICAL, rows, "canonical")
  lines = []
  for scheme in SCHEMES:
    mine = [row for row in rows if row["scheme"] == scheme.name]
    routes, tokens = (sum(row[f"{what}_differ"] for row in mine) for what in ("routes", "tokens"))
    lines.append(
      f"identity order, {scheme.name}: routes unlike native in {routes} of {len(mine)} prompts, "
      f"tokens in {tokens}"
    )
  return lines


if __name__ == "__main__":
  studies.main(run)
