"""Five fresh processes: nothing differs between them, until an order of summation is drawn in each.

    python -m experiments.route.process_replication --model=olmoe-nano --out=out/route

With a deterministic engine the variance between processes is zero by construction. What the paper
saw between its processes, another reduction order, is therefore done on purpose in a second arm: a
contract and orders drawn for each process. process_replication.tsv and process_runs.tsv, of the
first 16 sequences. Two minutes for a nano model.
"""

import numpy as np

from experiments.route import study as studies
from experiments.route.single_process import run_alone
from moejax.analysis.replication import replication
from moejax.inference import KvQuantization
from moejax.report import route_tables as tables

TABLES = (tables.REPLICATION, tables.REPLICATION_RUNS)
PROCESSES = 5
REPEATS = 2
SEQUENCES = 16
SCHEMES = ("P32", "C", "A", "B")


def run(study: studies.Study) -> list[str]:
  """Writes both tables; returns what to say."""
  if not isinstance(study.disturbance, KvQuantization):
    raise ValueError("process_replication: expected a simulated KV cache as the disturbance.")
  tokens = study.tokens[:SEQUENCES]
  size = dict(sequences=len(tokens), tokens=len(tokens) * (study.length - study.prefill))
  runs = []
  for number in study.progress(range(PROCESSES), "processes"):
    arms = dict(engine=dict(scheme=None, order_seed=None), orders=draw(study, number))
    for found in run_alone(study, tokens, repeats=REPEATS, arms=arms):
      total, drawn = found["excess_total"], arms[found["arm"]]
      rmf = found["route_forward"] / total if total > 0 else None
      what = dict(
        process=number, scheme=drawn["scheme"] or "native", order_seed=drawn["order_seed"], rmf=rmf
      )
      runs.append(size | found | what)
  study.write(tables.REPLICATION_RUNS, runs, "process_replication")
  rows = [
    size | summarise(study, arm, quantity, [row for row in runs if row["arm"] == arm])
    for arm in ("engine", "orders")
    for quantity in ("route_forward", "rmf")
    if all(row[quantity] is not None for row in runs)
  ]
  study.write(tables.REPLICATION, rows, "process_replication")
  return [
    f"processes, {row['arm']}, {row['quantity']}: {row['mean']:.4f}, deviation between "
    f"{row['between_sd']:.2g}, within {row['repeat_gap']:.2g}"
    for row in rows
  ]


def draw(study: studies.Study, number: int) -> dict:
  """The contract and the seed of the orders of a process."""
  rng = np.random.default_rng((study.seed, number))
  return dict(scheme=SCHEMES[rng.integers(len(SCHEMES))], order_seed=int(rng.integers(2**31)))


def summarise(study: studies.Study, arm: str, quantity: str, runs: list[dict]) -> dict:
  """Mean and variance components of an arm."""
  values = np.array([row[quantity] for row in runs]).reshape(PROCESSES, REPEATS)
  found = replication(values)
  names = ("mean", "between_sd", "low", "high", "within_sd", "repeat_gap", "icc")
  paper = [study.paper("process_replication", quantity, name) for name in ("mean", "between_sd")]
  return dict(
    arm=arm,
    quantity=quantity,
    processes=PROCESSES,
    paper=" ± ".join(filter(None, paper)),
    **{name: getattr(found, name) for name in names},
  )


if __name__ == "__main__":
  studies.main(run)
