"""The tables of the reduction study: the twenty of the paper's appendix A.4, five that it reports
only in text or left open, and the raw rows that they are counted from.

"post-mHC" is the state after a block; without hyper-connections it is the residual stream.
"""

from moejax.report.reduction_tables.columns import IDENTITY as IDENTITY
from moejax.report.reduction_tables.forks import (
  AGREEMENT,
  BASIN_COUNTS,
  BASIN_RANK_FREQUENCY,
  BRANCHES,
  BREADTH,
  BREADTH_BRANCHES,
  CONFUSION,
  EVENT_COUNTS,
  EVENT_UNIQUE,
  KV,
  KV_LAYERS,
  KV_SUMMARY,
  MHC,
  MHC_PREFORK,
  MHC_SUMMARY,
  REPLAY_BRANCHES,
  REPLAY_ENVIRONMENT,
  REPLAY_PAIRS,
)
from moejax.report.reduction_tables.further import (
  CERTIFICATE,
  CONTRACT_COST,
  MEDIATION,
  NATIVE_REPLAY,
  PROMPTS,
  TOPOLOGIES,
)
from moejax.report.reduction_tables.schedules import (
  C_INTERMEDIATE,
  CANONICAL,
  PERSISTENT,
  PROPAGATION,
  TRAJECTORIES,
)

_ALL = (
  NATIVE_REPLAY,
  BASIN_COUNTS,
  BASIN_RANK_FREQUENCY,
  BRANCHES,
  MHC_SUMMARY,
  MHC,
  MHC_PREFORK,
  KV_SUMMARY,
  KV,
  KV_LAYERS,
  EVENT_COUNTS,
  EVENT_UNIQUE,
  AGREEMENT,
  CONFUSION,
  BREADTH,
  BREADTH_BRANCHES,
  PERSISTENT,
  TRAJECTORIES,
  CANONICAL,
  C_INTERMEDIATE,
  PROPAGATION,
  REPLAY_BRANCHES,
  REPLAY_PAIRS,
  REPLAY_ENVIRONMENT,
  MEDIATION,
  CERTIFICATE,
  CONTRACT_COST,
  TOPOLOGIES,
  PROMPTS,
)
TABLES = {table.name: table for table in _ALL}
"""By name, in the order of the README."""
