"""Running a model: prefill, decode, generation, scoring, forks, four runs, substitution."""

from moejax.inference.batches import pad
from moejax.inference.branches import Event, Fork, fork, freeze
from moejax.inference.disturbances import (
  ActivationQuantization,
  Disturbance,
  Given,
  KvQuantization,
  PackedKv,
  Reduction,
  WeightQuantization,
)
from moejax.inference.forks import continue_forked, fork_farthest, Forks
from moejax.inference.forward import decode, forward, prefill
from moejax.inference.four_run import Controls, four_run, FourRun
from moejax.inference.generate import continue_greedily, emit, generate, Generation, greedy
from moejax.inference.routed import Condition, Routed, run_routed
from moejax.inference.score import Score, score
from moejax.inference.substitute import difference, num_differing, substitute
from moejax.inference.sweep import branch_sweep, Sweep
