"""The first five minutes: one expert sum in every order, and what becomes of it.

    python -m experiments.quickstart --out=out/quickstart

On a model in DeepSeek-V4's architecture that comes with the package: all 720 orders under A and all
360 classes under B of one sum, their texts, both state substitutions and the certificate; and the
four runs of a 4-bit KV cache on 24 windows of text. The rows are those of `experiments.reduction`
and `experiments.route`. About two minutes on two cores, mostly compiling.
"""

from concurrent import futures
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
from experiments.route import four_run
from experiments.route import study as route_studies
import moejax
from moejax.models import Mode
from moejax.report import paper_figures, route_tables
from moejax.report import reduction_tables as tables

PROTOCOLS = {
  "one sum in every order": branch_sweep,
  "state after the block, substituted": mhc_equivalence,
  "persistent state, substituted": kv_equivalence,
  "order-invariance certificate": certificate,
}
FOUR_RUNS = "four runs of a 4-bit cache"
SEQUENCES = 24  # of the four runs


def main(_):
  values = flags.FLAGS
  base.share_programs()
  common = moejax.load(values.model), Mode()
  out = pathlib.Path(values.out or "out/quickstart")
  reduction = studies.Study(
    *common, out, fork_layer=values.fork_layer, prompts=prompt_sets.DEPTH[:1], quiet=True
  )
  text = route_studies.read_text(None, "calibration")
  run(
    reduction,
    route_studies.Study(*common, out / "route", text=text, num_sequences=SEQUENCES, quiet=True),
  )


def run(study: studies.Study, route: route_studies.Study) -> None:
  """Runs the protocols with a bar, then prints one screen."""
  study.claim()
  route.claim()
  names = (*PROTOCOLS, FOUR_RUNS)
  with futures.ThreadPoolExecutor(1) as pool:
    # Compiling, most of the time, keeps one core busy; the four runs have another.
    ahead = pool.submit(route.contrasts, route.disturbance)
    for name in dataclasses.replace(study, quiet=False).progress(names, "quickstart"):
      if name == FOUR_RUNS:
        ahead.result()
        four_run.write(route, [route.disturbance])
      else:
        PROTOCOLS[name].run(study)
  print("\n".join(summary(study, route)))


def summary(study: studies.Study, route: route_studies.Study) -> list[str]:
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
  (row,) = route_tables.FOUR_RUN.read(route.out)
  share = "is NOT INTERPRETABLE: the excess does not exclude zero"
  if row["interpretable"]:
    share = f"{row['rmf']:.2f} [{row['rmf_low']:.2f}, {row['rmf_high']:.2f}]"
  lines += [
    f"  A 4-bit KV cache on {row['sequences']} windows of text: "
    f"{row['excess_total']:+.4f} nats per token [{row['excess_total_low']:.4f}, "
    f"{row['excess_total_high']:.4f}],",
    f"     routes changed for {row['flip_rate']:.0%} of tokens; the share of the damage that goes "
    f"through routing (RMF) {share}",
  ]
  return [
    *lines,
    "",
    "What it means: the order in which a runtime adds its experts is part of what it computes,",
    "except where it is proved not to be (C). What a changed order does later is all in the state:",
    "moving the state moves the text.",
    "What it does not mean: how often this happens in a deployment, or how much elsewhere.",
    paper_figures.NOTE,
    "",
    f"Tables and figures: {study.out}/ (whole studies: python -m experiments.reduction.run_all",
    "and python -m experiments.route.run_all)",
  ]


if __name__ == "__main__":
  app.run(main)
