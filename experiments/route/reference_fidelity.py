"""Which clean routes must be known: all of them, those of the prefix, or those of decoding.

    python -m experiments.route.reference_fidelity --model=olmoe-nano --out=out/route

Recovery over the routed ceiling and over the total damage stand in columns of their own: they are
not comparable. reference_fidelity.tsv. Ten seconds for a nano model.
"""

import numpy as np

from experiments.route import study as studies
from experiments.route.measure import estimate, share_of
from moejax.report import route_tables as tables

TABLES = (tables.REFERENCE_FIDELITY,)


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  four = study.four
  qf, position = four.qf.nll.astype(np.float64), np.arange(study.length - 1)
  losses = dict(full=four.qp.nll)
  for name, known in (("prefix", position < study.prefill), ("decode", position >= study.prefill)):
    losses[name] = study.run(study.disturbed, study.clean.pins(known[None, None])).nll
  rows = []
  for name, loss in losses.items():
    recovered = qf - loss
    rows.append(
      dict(
        reference=name,
        **estimate("of_routed", share_of(recovered, four.route_forward, study.seed)),
        **estimate("of_total", share_of(recovered, four.total, study.seed)),
        paper=study.paper("reference_fidelity", name, "of_routed"),
      )
    )
  study.write(tables.REFERENCE_FIDELITY, rows, "reference_fidelity")
  shares = {row["reference"]: row["of_total"] for row in rows}
  if None in shares.values():
    return ["reference fidelity: NOT INTERPRETABLE, no damage to recover"]
  named = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
  return [f"reference fidelity, recovered of the total damage: {named}"]


if __name__ == "__main__":
  studies.main(run)
