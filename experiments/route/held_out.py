"""The held-out split, read once, on three endpoints that are hashed before the read.

    python -m experiments.route.held_out --model=olmoe-nano --out=out/route

Reads four_run.tsv of the same folder for the discovery interval. A second read is refused; --force
does it, and marks every later row for good. held_out.tsv. A minute for a nano model.
"""

import dataclasses

from absl import flags
import numpy as np

from experiments.route import policies
from experiments.route import study as studies
from experiments.route.measure import estimate, mean_of
from moejax.analysis.attribution import signed_flip_tax
from moejax.report import registry
from moejax.report import route_tables as tables
from moejax.report.held_out import open_once, Protocol
from moejax.report.registry import Prediction

TABLES = (tables.HELD_OUT,)
TAX_SHARE = 0.2  # of either component
ORACLE_BOUND, ORACLE_DOSE = 0.008, 0.0757  # nats; scaled by the dose
_FORCE = flags.DEFINE_boolean("force", False, "Reads again, which stays marked.")


def run(study: studies.Study, force: bool = False) -> list[str]:
  """Reads the split, writes the table; returns what to say."""
  found = tables.FOUR_RUN.read(study.out)
  (discovery,) = (row for row in found if row["disturbance"] == study.disturbance.name)
  if not discovery["interpretable"]:
    return ["held out: not read, for the discovery has no interpretable RMF to confirm"]
  files = list(study.files) if study.files else None
  sha256 = studies.read_text(files, "held_out").sha256
  protocol = Protocol(
    endpoints(discovery),
    study.model.name,
    study.model.sha256,
    sha256,
    {name: discovery[name] for name in ("rmf", "rmf_low", "rmf_high", "excess_total")},
  )
  read = lambda: studies.read_text(files, "held_out")
  text, reading = open_once(study.out, protocol, sha256, read, force=force)
  row = measure(dataclasses.replace(study, text=text))
  row |= dict(
    reading=reading.number,
    forced_reads=reading.forced_reads,
    protocol_sha256=reading.protocol_sha256,
  )
  study.write(tables.HELD_OUT, [row], "held_out", text)
  verdicts = registry.evaluate(protocol.endpoints, {"held_out": [row]})
  return [f"held out, {registry.describe(verdict)}" for verdict in verdicts]


def endpoints(discovery: dict) -> tuple[Prediction, ...]:
  """The three of the paper."""
  make = lambda id, claim, mechanism, columns, rule, bounds, paper: Prediction(
    id, claim, mechanism, "held_out", {}, columns, rule, bounds, paper
  )
  interval = tuple(discovery[f"rmf_{end}"] for end in ("low", "high"))
  return (
    make(
      "H1",
      "The routed share overlaps the discovery interval.",
      "The share is a property of the model and the dose.",
      ("rmf_low", "rmf_high"),
      "overlaps",
      interval,
      "0.429 [0.330, 0.519] against [0.20, 0.41]: met",
    ),
    make(
      "H2",
      "The net signed-flip tax is small beside either component.",
      "The sign of a flip is a coin.",
      ("tax_net", "tax_harmful", "tax_beneficial"),
      "small_beside",
      (TAX_SHARE,),
      "+0.0043 beside 0.042 and 0.049: met",
    ),
    make(
      "H3",
      "Oracle-gated recovery has an upper bound below 0.008 nats, scaled by the dose.",
      "Local repair cannot give back what is decided elsewhere.",
      ("oracle_high",),
      "less",
      ("oracle_bound",),
      "0.0082 against 0.008: missed",
    ),
  )


def measure(study: studies.Study) -> dict:
  """The columns of the read."""
  row, four = study.contrasts(study.disturbance)
  flipped = four.flips()[study.routers].any(axis=0)
  tax = signed_flip_tax(four.route_forward, flipped)
  oracle = flipped & (four.route_forward > 0)
  recovered = four.qf.nll.astype(np.float64) - policies.run_mask(study, oracle)
  count = flipped.size
  return row | dict(
    tax_net=tax.net / count,
    tax_harmful=tax.harmful / count,
    tax_beneficial=tax.beneficial / count,
    oracle_bound=ORACLE_BOUND * row["excess_total"] / ORACLE_DOSE,
    **estimate("oracle", mean_of(recovered, study.seed)),
  )


if __name__ == "__main__":
  studies.main(lambda study: run(study, _FORCE.value))
