"""The tables of the route study; one schema each for writer, reader and description."""

from moejax.report.route_tables.columns import IDENTITY as IDENTITY
from moejax.report.route_tables.runs import (
  ATTRIBUTION,
  DOSE_SUMMARY,
  DOSE_SWEEP,
  EXCHANGE_RATE,
  FOUR_RUN,
  HELD_OUT,
  LAYERS,
  REAL_KERNEL,
  REPLICATION,
  REPLICATION_RUNS,
  TASK_LEVEL,
  TAX,
  WEIGHT_BOUND,
)
from moejax.report.route_tables.signals import (
  DATA_MANIFEST,
  DETECTION,
  EVIDENCE,
  FLAG_SWAP,
  GAIN,
  GAIN_SUMMARY,
  LEDGER,
  POLICIES,
  PROBES,
  REFERENCE_FIDELITY,
  SMOOTHING,
  VERDICTS,
)

_ALL = (
  FOUR_RUN,
  ATTRIBUTION,
  TAX,
  LAYERS,
  DETECTION,
  PROBES,
  POLICIES,
  SMOOTHING,
  REFERENCE_FIDELITY,
  FLAG_SWAP,
  DOSE_SWEEP,
  DOSE_SUMMARY,
  WEIGHT_BOUND,
  REAL_KERNEL,
  REPLICATION,
  REPLICATION_RUNS,
  TASK_LEVEL,
  GAIN,
  GAIN_SUMMARY,
  EXCHANGE_RATE,
  HELD_OUT,
  DATA_MANIFEST,
  VERDICTS,
  EVIDENCE,
  LEDGER,
)
TABLES = {table.name: table for table in _ALL}
"""By name, in the order of the README."""
