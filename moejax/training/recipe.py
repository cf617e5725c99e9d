"""How a nano model is trained: sizes, schedule and optimiser.

Muon (Jordan, 2024) on matrices, with updates of Adam's size (Liu et al., 2025), and Adam on the
rest. What has no gradient or is not learned by one stays as it is: tables of expert ids, biases of
router scores, and the lightning indexer, whose choice is not differentiable.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

# Matrices inside the network; embedding, head, router and everything of one axis are Adam's.
_MATRICES = ("q", "k", "v", "o", "gate_up", "down", "q_a", "q_b", "kv", "gate", "o_a", "o_b")


class Phase(NamedTuple):
  """Of a run: whether values are rounded to BF16, and whether repetition has a price."""

  rounded: bool = False
  repetition: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A training run.

  Attributes:
    tokens: planned, the end of the schedule.
    batch, length: sequences per step and tokens per sequence.
    peak_rate: of Muon and Adam after `warmup_steps`; held, then linear to `final_share` of it.
    decay_from, rounded_from: shares of the tokens after which the rate falls, and after which
      weights and activations are rounded to BF16 as the family's own code rounds them.
    weight_decay: of the matrices.
    aux_loss: coefficient of the load-balancing loss (Switch Transformer), for families without a
      score bias.
    router_z_loss, logit_z_loss: coefficients of mean squared log-sum-exps.
    repetition_loss: coefficient of the unlikelihood of repeated trigrams, after the share
      `repetition_from` of the tokens.
    bias_rate: step of the score bias toward balance, for families with one (DeepSeek-V3).
    seed: of parameters and data.
  """

  tokens: int
  batch: int = 8
  length: int = 256
  peak_rate: float = 0.01
  warmup_steps: int = 60
  decay_from: float = 0.6
  final_share: float = 0.02
  rounded_from: float = 0.9
  weight_decay: float = 0.05
  aux_loss: float = 0.02
  router_z_loss: float = 1e-4
  logit_z_loss: float = 1e-4
  repetition_loss: float = 2.0
  repetition_from: float = 0.3
  bias_rate: float = 1e-3
  seed: int = 0

  @property
  def steps(self) -> int:
    return -(-self.tokens // (self.batch * self.length))

  def phase(self, step: int) -> "Phase":
    """What is done differently at a step, counted from 0."""
    begun = lambda share: step >= round(share * self.steps)
    return Phase(begun(self.rounded_from), begun(self.repetition_from))

  def rate(self, step, first_step=0):
    """Learning rate of a step, counted from 0; warmed up from `first_step` on."""
    step = jnp.asarray(step, jnp.float32)
    since = step - jnp.asarray(first_step, jnp.float32)
    warm = jnp.minimum(1.0, (since + 1.0) / max(self.warmup_steps, 1))
    start = self.decay_from * self.steps
    through = jnp.clip((step - start) / max(self.steps - start, 1.0), 0.0, 1.0)
    return self.peak_rate * warm * (1.0 - (1.0 - self.final_share) * through)

  def optimizer(self, first_step=0) -> optax.GradientTransformation:
    """Clipping, then Muon and Adam; made for a run that starts at `first_step`."""
    rate = lambda count: self.rate(count + first_step, first_step)
    muon = contrib.muon(
      rate,
      weight_decay=self.weight_decay,
      adam_b2=0.95,
      muon_weight_dimension_numbers=_dimension_numbers,
      consistent_rms=0.2,
    )
    transforms = {"learned": muon, "kept": optax.set_to_zero()}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(transforms, _labels))


def _names(path) -> list[str]:
  return [entry.key for entry in path]


def _labels(params):
  def label(path, x):
    names = _names(path)
    kept = names[-1] in ("router_bias", "hash_table") or "indexer" in names
    return "kept" if kept else "learned"

  return jax.tree_util.tree_map_with_path(label, params)


def _dimension_numbers(params):
  def numbers(path, x):
    if _names(path)[-1] not in _MATRICES or getattr(x, "ndim", 0) < 2:
      return None
    return contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

  return jax.tree_util.tree_map_with_path(numbers, params)
