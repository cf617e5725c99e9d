"""What runs are turned into: functions of arrays. Needs the extra `stats`."""

from moejax.analysis import (
  agreement,
  annotation,
  attribution,
  breadth,
  detection,
  dose,
  gain,
  replication,
)
from moejax.analysis.basins import Basins, basins, check_scheme_b, rank_frequency, tokens_sha256
from moejax.analysis.bootstrap import cluster_bootstrap, Estimate
from moejax.analysis.ngrams import Ngrams
