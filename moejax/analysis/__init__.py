"""What runs are turned into: functions of arrays. Needs the extra `stats`."""

from moejax.analysis.bootstrap import cluster_bootstrap, Estimate
from moejax.analysis.ngrams import Ngrams
