"""The first five minutes: one expert sum in every order, and what becomes of it.

    python -m experiments.quickstart --out=out/quickstart

On a model in DeepSeek-V4's architecture that comes with the package: all 720 orders under A and all
360 classes under B of one sum, their texts, both state substitutions and the certificate. The rows
are those of `experiments.reduction`. Under two minutes on two cores.
"""

import dataclasses
import pathlib

from absl import app, flags

from configs import prompts as prompt_sets
from experiments import study as base
from experiments.reduction import (
  branch_sweep,
  certificate,
  kv_equivalence,
  mhc_equivalence,
)
from experiments.reduction import (
  study as studies,
)
import moejax
from moejax.models import Mode
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables

PROTOCOLS = {
  "one sum in every order": branch_sweep,
  "state after the block, substituted": mhc_equivalence,
  "persistent state, substituted": kv_equivalence,
  "order-invariance certificate": certificate,
}


def main(_):
  values = flags.FLAGS
  base.share_programs()
  study = studies.Study(
    moejax.load(values.model),
    Mode(),
    pathlib.Path(values.out or "out/quickstart"),
    fork_layer=values.fork_layer,
    prompts=prompt_sets.DEPTH[:1],
    quiet=True,
  )
  run(study)


def run(study: studies.Study) -> None:
  """Runs the protocols with a bar, then prints one screen."""
  for protocol in study_bar(study):
    PROTOCOLS[protocol].run(study)
  print("\n".join(summary(study)))


def study_bar(study: studies.Study):
  """The names of the protocols, on a progress bar."""
  study.claim()
  return dataclasses.replace(study, quiet=False).progress(PROTOCOLS, "quickstart")


def summary(study: studies.Study) -> list[str]:
  """What was found, what it means, and what it does not; from the tables."""
  counts = {(row["scheme"], row["horizon"]): row for row in tables.BASIN_COUNTS.read(study.out)}
  horizons = sorted({horizon for _, horizon in counts})
  prompt = study.prompts[0].text
  (block,), (state,) = (t.read(study.out) for t in (tables.MHC_SUMMARY, tables.KV_SUMMARY))
  proofs = {r["scheme"]: r for r in tables.CERTIFICATE.read(study.out) if r["layer"] == -1}
  lines = [
    "",
    f"{study.model.name}, {prompt!r}: one sum of {study.model.config.top_k} experts, "
    f"layer {study.fork_layer}, first generated token",
    "",
  ]
  for scheme in ("A", "B"):
    row = counts[scheme, horizons[-1]]
    texts = ", ".join(str(counts[scheme, horizon]["texts"]) for horizon in horizons)
    lines.append(
      f"  {scheme}: {row['orders']} orders, {row['classes']} classes, {row['outputs']} different "
      f"outputs, {row['states']} states after the block, {row['complete_states']} after the event;"
    )
    lines.append(f"     different texts after {', '.join(map(str, horizons))} tokens: {texts}")
  lines += [
    f"  State after the block, moved from class {block['branch']} to the native run: "
    f"{block['post_mhc_equal']}/{block['post_mhc_checkpoints']} states, "
    f"{block['routes_equal']}/{block['route_checkpoints']} routes equal"
    + (" (CONTROL VACUOUS: no class leaves native later)" if block["vacuous"] else ""),
    f"  Persistent state, moved at the next token: {state['states_equal']}/{state['checkpoints']} "
    f"states equal; FP64 difference rebuilds {state['fp64_layers']}/{state['layers']} layers, FP32 "
    f"{state['fp32_layers']}"
    + (" (CONTROL VACUOUS: no class leaves native later)" if state["vacuous"] else ""),
  ]
  for scheme in ("C", "B"):
    row = proofs[scheme]
    lines.append(
      f"  {scheme}: {row['certified'] / row['elements']:.2%} of elements proved to be the same in "
      f"every order; {row['false_proofs']} proofs refuted"
    )
  return [
    *lines,
    "",
    "What it means: the order in which a runtime adds its experts is part of what it computes,",
    "except where it is proved not to be (C). What a changed order does later is all in the state:",
    "moving the state moves the text.",
    "What it does not mean: how often this happens in a deployment, or how much elsewhere.",
    paper_figures.NOTE,
    "",
    f"Tables and figures: {study.out}/ (whole study: python -m experiments.reduction.run_all)",
  ]


if __name__ == "__main__":
  app.run(main)
