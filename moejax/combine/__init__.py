"""The expert combine as a value: contracts, orders, enumeration, certificates."""

from moejax.combine.accumulators import (
  Accumulator,
  EMULATED,
  fold,
  fold_orders,
  FP8_E4M3,
  FP8_E5M2,
  FP16,
  guarded_bf16,
)
from moejax.combine.certificate import certify, counterexample, exponent_spread_rule
from moejax.combine.contract import A, B, C, Contract, EXACT, merge_shared, named, P32, SCHEMES
from moejax.combine.enumeration import all_orders_fingerprints, combine_all_orders
from moejax.combine.orders import (
  all_orders,
  class_representatives,
  lexicographic_rank,
  sample_orders,
  structural_classes,
  study_orders,
)
from moejax.combine.reduce import combine, combine_rows
from moejax.combine.schedules import dynamic_schedule, schedule
from moejax.combine.spread import measure_spread, Spread
from moejax.combine.topology import expert_parallel, fixed_tree, pairwise, SEQUENTIAL, Topology
from moejax.combine.topology_survey import survey
