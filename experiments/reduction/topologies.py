"""Other ways to add the same terms: trees, ranks, rings, FP16, FP8 and guarded accumulators.

    python -m experiments.reduction.topologies --model=dsv4-nano --out=out/reduction

The terms of the fork events of three prompts, and a real all-reduce over simulated devices: which
of its models gives its bits. topologies.tsv. Half a minute for a nano model.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import collective
from experiments.reduction import study as studies
from moejax import combine
from moejax.combine import topology_survey
from moejax.combine.topology import ACROSS
from moejax.inference import branches, Event
from moejax.inference.branches import outputs_of
from moejax.numerics.bf16 import ulp_bf16_distance
from moejax.report import reduction_tables as tables


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  model, rows, events = study.model, [], {}
  contract = model.module.contract(study.mode)
  orders, _ = branches.branch_orders(model.config.top_k, combine.A, key=study.key())
  for prompt in study.progress(study.prompts or prompt_sets.DEPTH, "topologies"):
    event = events[prompt.id] = study.freeze(prompt)
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
  names = dict.fromkeys(row["accumulator"] for row in rows)
  lines = [summarise(rows, name) for name in names]
  real, said = collective_rows(study, events)
  study.write(tables.TOPOLOGIES, rows + real, "topologies")
  return lines + said


def collective_rows(study: studies.Study, events: dict[str, Event]):
  """(rows of a real all-reduce of FP32 and BF16 partial sums, which of its models it is)."""
  contract = study.model.module.contract(study.mode)
  totals = collective.all_reduce(
    {
      f"{prompt}/{ranks}": partial_sums(study, event, ranks)
      for prompt, event in events.items()
      for ranks in collective.RANKS
    }
  )
  rows, models = [], {}
  for name, total in totals.items():
    prompt, ranks, dtype = name.split("/")
    event, owners = events[prompt], rank_of(study, events[prompt], int(ranks))
    outputs = {"all_reduce": merged(event, total, contract)}
    for across in ACROSS:
      if across == "ring" and total.size % int(ranks):
        continue
      topology = combine.expert_parallel(int(ranks), across, dtype)
      # The ranks add in FP32; the collective in its dtype.
      scheme = dataclasses.replace(contract.with_scheme(combine.C), topology=topology)
      order = np.arange(len(event.ids), dtype=np.int32)
      joined = combine.combine(event.terms, order, scheme, ranks=owners)
      outputs[across] = merged(event, joined, contract)
    alike = [
      across
      for across in outputs
      if across != "all_reduce" and outputs[across].tobytes() == outputs["all_reduce"].tobytes()
    ]
    models.setdefault((ranks, dtype), []).append(set(alike))
    exact = outputs_of(event, contract.with_scheme(combine.EXACT), np.arange(len(event.ids))[None])
    ulps = ulp_bf16_distance(outputs["all_reduce"], exact[0])
    rows.append(
      dict(
        prompt=prompt,
        layer=study.fork_layer,
        topology=f"all_reduce/{ranks}",
        accumulator=dtype,
        orders=1,
        outputs=1,
        linf=float(np.abs(outputs["all_reduce"] - exact[0]).max()),
        ulps_max=int(ulps.max()),
        ulps_mean=float(ulps.mean()),
        certified_share=None,
        like_native=outputs["all_reduce"].tobytes() == event.combined.tobytes(),
      )
    )
  said = [
    f"XLA's all-reduce of {dtype} partial sums over {ranks} ranks has the bits of: "
    f"{', '.join(sorted(set.intersection(*found))) or 'none of its models'}"
    for (ranks, dtype), found in models.items()
  ]
  return rows, said


def rank_of(study: studies.Study, event: Event, ranks: int) -> np.ndarray:
  """int32 [K]: the rank that owns each expert, a run of ids each."""
  return (event.ids * ranks // study.model.config.num_experts).astype(np.int32)


def partial_sums(study: studies.Study, event: Event, ranks: int) -> np.ndarray:
  """float32 [ranks, D]: each rank's operands in FP32, by ascending id."""
  operands = study.model.module.contract(study.mode).round_operand(np.asarray(event.terms))
  sums = np.zeros((ranks, operands.shape[1]), np.float32)
  for owner, operand in zip(rank_of(study, event, ranks), operands):
    sums[owner] += operand
  return sums


def merged(event: Event, total, contract: combine.Contract) -> np.ndarray:
  """float32 [D]: the MoE output of a routed sum."""
  return np.asarray(combine.merge_shared(jnp.asarray(total), event.shared, contract))


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
