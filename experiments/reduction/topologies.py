"""Other ways to add the same terms: trees, ranks, rings, FP16, FP8 and guarded accumulators.

    python -m experiments.reduction.topologies --model=dsv4-nano --out=out/reduction

The terms of the fork events of three prompts. topologies.tsv. Half a minute for a nano model.
"""

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import study as studies
from moejax import combine
from moejax.combine import topology_survey
from moejax.inference import branches, freeze
from moejax.report import reduction_tables as tables


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  model, rows = study.model, []
  contract = model.module.contract(study.mode)
  orders, _ = branches.branch_orders(model.config.top_k, combine.A, key=study.key())
  for prompt in study.progress(study.prompts or prompt_sets.DEPTH, "topologies"):
    ids = study.encode(prompt)
    event = freeze(model, ids, study.fork_layer, len(ids) + 1, mode=study.mode)
    found = topology_survey.survey(
      np.asarray(event.terms),
      None if event.shared is None else np.asarray(event.shared),
      contract,
      orders,
      event.native_order(contract),
      ids=event.ids,
      num_experts=model.config.num_experts,
    )
    rows += [dict(prompt=prompt.id, layer=study.fork_layer, **_columns(row)) for row in found]
  study.write(tables.TOPOLOGIES, rows, "topologies")
  return [summarise(rows, name) for name in dict.fromkeys(row["accumulator"] for row in rows)]


def _columns(row: topology_survey.Row) -> dict:
  number = lambda x: None if x == "" else x
  return dict(
    topology=row.topology,
    accumulator=row.accumulator,
    orders=row.num_orders,
    outputs=row.distinct_outputs,
    linf=None if np.isnan(row.linf_max) else row.linf_max,
    ulps_max=number(row.ulps_max),
    ulps_mean=number(row.ulps_mean),
    certified_share=number(row.certified_share),
    like_native=row.equals_native,
  )


def summarise(rows: list[dict], accumulator: str) -> str:
  """One line of an accumulator: its sequential sums, and its topologies."""
  mine = [row for row in rows if row["accumulator"] == accumulator]
  line = [row for row in mine if row["topology"] == "sequential"]
  outputs = ", ".join(str(row["outputs"]) for row in line)
  alike = sum(row["like_native"] for row in mine)
  return (
    f"accumulator {accumulator}: {outputs} outputs of {line[0]['orders']} orders; "
    f"{alike} of {len(mine)} topologies and prompts like native"
  )


if __name__ == "__main__":
  studies.main(run)
