"""The order-invariance certificate on real terms: what is proved, and that no proof is false.

    python -m experiments.reduction.certificate --model=dsv4-nano --out=out/reduction

Every combine of three prompts and their native continuations, under C, P32, B and A, by layer,
against all orders of the study. certificate.tsv. A minute for a nano model.
"""

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import schedule_runs
from experiments.reduction import study as studies
from moejax import combine
from moejax.inference import branches
from moejax.report import reduction_tables as tables

SCHEMES = (combine.C, combine.P32, combine.B, combine.A)
_TOKENS = 8


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  terms = []
  for prompt in study.prompts or prompt_sets.DEPTH:
    ids = study.encode(prompt)
    terms.append(schedule_runs.native_run(study, ids, study.horizon or _TOKENS)[1])
  terms = np.concatenate(terms, axis=1)  # [M, T, K, D]
  rows = []
  for scheme in study.progress(SCHEMES, "certificates"):
    mine = [
      dict(scheme=scheme.name, layer=layer, **measure(study, sets, scheme))
      for layer, sets in zip(study.model.config.moe_layers, terms)
    ]
    names = ("combines", "elements", "certified", "invariant", "false_proofs", "whole")
    total = {name: sum(row[name] for row in mine) for name in names}
    rows += [*mine, dict(scheme=scheme.name, layer=-1, orders=mine[0]["orders"], **total)]
  study.write(tables.CERTIFICATE, rows, "certificate")
  return [
    f"certificate, {row['scheme']}: {row['certified'] / row['elements']:.4%} of {row['elements']} "
    f"elements proved order-invariant ({row['invariant'] / row['elements']:.4%} are), "
    f"{row['whole']} of {row['combines']} combines whole; {row['false_proofs']} false proofs"
    for row in rows
    if row["layer"] == -1
  ]


def measure(study: studies.Study, sets: np.ndarray, scheme: combine.Contract) -> dict[str, int]:
  """Of the term sets float32 [T, K, D] of a layer."""
  contract = study.model.module.contract(study.mode).with_scheme(scheme)
  orders, _ = branches.branch_orders(sets.shape[1], scheme, key=study.key(scheme.code))
  flat = np.moveaxis(sets, 1, 0).reshape(sets.shape[1], -1)
  proved = np.asarray(combine.certify(flat, contract))
  invariant = np.concatenate(
    [unchanged(part, contract, orders) for part in np.array_split(flat, len(sets), axis=1)]
  )
  return dict(
    combines=len(sets),
    elements=proved.size,
    certified=int(proved.sum()),
    invariant=int(invariant.sum()),
    false_proofs=int((proved & ~invariant).sum()),
    whole=int(proved.reshape(len(sets), -1).all(axis=1).sum()),
    orders=len(orders),
  )


def unchanged(terms: np.ndarray, contract: combine.Contract, orders: np.ndarray) -> np.ndarray:
  """bool [H]: every order gives the same bits."""
  sums = np.asarray(combine.combine_all_orders(terms, contract, orders=orders)[1])
  return (sums.view(np.uint32) == sums.view(np.uint32)[:1]).all(axis=0)


if __name__ == "__main__":
  studies.main(run)
