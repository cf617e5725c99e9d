"""The whole route study of a model, then verdicts, evidence and the ledger of negative results.

    python -m experiments.route.run_all --model=olmoe-nano --out=out/route

Predictions are registered before anything runs. All tables of moejax/report/route_tables/,
README.md that describes them, figures, summary.txt and timings.tsv. Twelve minutes for a nano
model of 10 layers. A killed run goes on with --resume: what has its tables is kept.
"""

import dataclasses
import resource
import time

import numpy as np

from configs.route_predictions import CLAIMS, PREDICTIONS
from experiments.route import (
  attribution,
  detection,
  disturbance_gain,
  dose_sweep,
  exchange_rate,
  flag_swap,
  four_run,
  held_out,
  policies,
  process_replication,
  real_kernel,
  reference_fidelity,
  task_level,
  weight_bound,
)
from experiments.route import (
  study as studies,
)
from moejax.data.splits import terciles
from moejax.report import evidence, paper_figures, registry
from moejax.report import route_tables as tables
from moejax.report.schema import readme
from moejax.report.tables import write_tsv

PROTOCOLS = (
  four_run,
  attribution,
  detection,
  policies,
  reference_fidelity,
  exchange_rate,
  flag_swap,
  disturbance_gain,
  weight_bound,
  dose_sweep,
  real_kernel,
  task_level,
  process_replication,
  held_out,
)


def run(study: studies.Study) -> list[str]:
  """Runs everything; returns what to say."""
  # What cannot be done is said before anything runs.
  detection.check(study)
  registry.check(PREDICTIONS, tables.TABLES)
  registry.register(study.out, PREDICTIONS, study.record())
  study.write_text("README.md", readme("Tables of the route study", tables.TABLES.values()))
  study.write(tables.DATA_MANIFEST, manifest(study), "run_all")
  said, times = [], []
  for protocol in PROTOCOLS:
    start, name = time.monotonic(), protocol.__name__.rsplit(".", 1)[1]
    if study.resume and all(table.path(study.out).is_file() for table in protocol.TABLES):
      said.append(f"{name}: kept")
      continue
    said += protocol.run(study)
    times.append((name, f"{time.monotonic() - start:.1f}"))
  said += conclude(study)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  total = sum(float(seconds) for _, seconds in times)
  said.append(f"{len(times)} protocols in {total / 60:.1f} minutes, peak {peak:.2f} GiB")
  write_tsv(study.out / "timings.tsv", ("protocol", "seconds"), times)
  study.write_text("summary.txt", "\n".join([*said, paper_figures.NOTES["route"]]) + "\n")
  return said


def manifest(study: studies.Study) -> list[dict]:
  """Source by tercile of length: six buckets for two sources."""
  documents = study.text.documents
  lengths = [len(study.model.tokenizer.encode(document.text)) for document in documents]
  sources = [" ".join(filter(None, (d.source, d.language))) for d in documents]
  thirds = terciles(sources, lengths)
  drawn = np.bincount(study.windows.document, minlength=len(documents))
  rows = []
  for source in dict.fromkeys(sources):
    for third in range(3):
      here = (np.asarray(sources) == source) & (thirds == third)
      count = int(drawn[here].sum())
      rows.append(
        dict(source=source, tercile=third, documents=int(here.sum()), bucket_sequences=count)
      )
  return rows


def conclude(study: studies.Study) -> list[str]:
  """Verdicts, evidence and ledger from the tables as written."""
  rows = {
    name: table.read(study.out)
    for name, table in tables.TABLES.items()
    if table.path(study.out).is_file()
  }
  verdicts = registry.evaluate(PREDICTIONS, rows)
  matrix = evidence.evidence_rows(CLAIMS, rows)
  ledger = evidence.ledger_rows(verdicts, matrix)
  study.write(tables.VERDICTS, [dataclasses.asdict(verdict) for verdict in verdicts], "run_all")
  # What no row supports has no sample either; the row then says the study's.
  known = [{k: v for k, v in row.items() if v is not None or k not in _SAMPLE} for row in matrix]
  study.write(tables.EVIDENCE, known, "run_all")
  study.write(tables.LEDGER, ledger, "run_all")
  return [registry.describe(verdict) for verdict in verdicts]


_SAMPLE = ("split", "sequences", "tokens")

if __name__ == "__main__":
  studies.main(run)
