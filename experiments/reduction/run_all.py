"""Every protocol of the reduction study, one after another, then the audit.

    python -m experiments.reduction.run_all --model=dsv4-nano --out=out/reduction

All tables of moejax/report/reduction_tables/, README.md that describes them, figures, summary.txt
and timings.tsv. About ten minutes for a nano model; a killed run goes on with --resume.
"""

import resource
import time

import jax

from experiments.reduction import (
  audit,
  branch_sweep,
  breadth,
  canonical,
  certificate,
  contract_cost,
  event_direction,
  intermediate,
  kv_equivalence,
  mediation,
  mhc_equivalence,
  native_replay,
  persistent,
  propagation_trace,
  topologies,
)
from experiments.reduction import (
  study as studies,
)
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables
from moejax.report.schema import readme
from moejax.report.tables import write_tsv

# The control of the replay comes first.
PROTOCOLS = (
  native_replay,
  branch_sweep,
  mhc_equivalence,
  kv_equivalence,
  event_direction,
  breadth,
  persistent,
  canonical,
  intermediate,
  propagation_trace,
  mediation,
  certificate,
  topologies,
  contract_cost,
)


def run(study: studies.Study) -> list[str]:
  """Runs everything; returns what to say."""
  # What cannot be done is said before anything runs.
  mediation.check(study)
  propagation_trace.layers(study)
  study.write_text("README.md", readme("Tables of the reduction study", tables.TABLES.values()))
  said, times = [], []
  for protocol in PROTOCOLS:
    start = time.monotonic()
    said += protocol.run(study)
    # A program is hundreds of megabytes; those that are needed again are read back in a second.
    jax.clear_caches()
    name = protocol.__name__.rsplit(".", 1)[1]
    times.append((name, f"{time.monotonic() - start:.1f}"))
  said += audit.run(study)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  total = sum(float(seconds) for _, seconds in times)
  said.append(f"{len(PROTOCOLS)} protocols in {total / 60:.1f} minutes, peak {peak:.2f} GiB")
  write_tsv(study.out / "timings.tsv", ("protocol", "seconds"), times)
  study.write_text("summary.txt", "\n".join([*said, paper_figures.NOTE]) + "\n")
  return said


if __name__ == "__main__":
  studies.main(run)
