"""Where routed damage sits: shares by where the route changed, and flips for and against.

The harm of a token is L(Y_QF) - L(Y_QP) in nats: what the disturbed run's own route costs it over
the clean one (route study, section 3). A share of it is an attribution: what repairing those
tokens would give back is another question, answered by a run.
"""

import dataclasses
import fractions
import math
from typing import Any, NamedTuple

import numpy as np


class Partition(NamedTuple):
  """One entry for each kind of token: masks bool [B, N], or what falls to each of them.

  `jump`: the scoring layer's set of experts changed. `nonlocal_`: it did not, but one upstream did.
  `pure_flux`: no set changed.
  """

  jump: Any
  nonlocal_: Any
  pure_flux: Any


@dataclasses.dataclass(frozen=True)
class FlipTax:
  """Harm of flipped tokens by its sign; magnitudes in nats, all 0 or more but `net`.

  Attributes:
    harmful: summed magnitude where harm > 0.
    beneficial: summed magnitude where harm < 0.
    net: harmful - beneficial.
    flips: flipped tokens, those without harm or benefit included.
    harmful_flips, beneficial_flips: how many of each sign.
    harmful_mean, beneficial_mean: magnitude of one; None where there are none.
    cancellation: the smaller of the two sums over the larger; None where both are zero.
  """

  harmful: float
  beneficial: float
  net: float
  flips: int
  harmful_flips: int
  beneficial_flips: int
  harmful_mean: float | None
  beneficial_mean: float | None
  cancellation: float | None


def masks(flips: np.ndarray) -> Partition:
  """Masks bool [B, N] of the three kinds; each token is in exactly one.

  Args:
    flips: bool [L, B, N], whether a token's set of experts changed, by MoE layer from the first to
      the last, which is the scoring layer.

  Raises:
    ValueError: another rank or dtype, or no layers.
  """
  flips = np.asarray(flips)
  if flips.ndim != 3 or flips.dtype != bool or not len(flips):
    raise ValueError(
      f"flips must be bool [L, B, N] of at least one layer, got {flips.dtype} {flips.shape}."
    )
  jump, upstream = flips[-1], flips[:-1].any(axis=0)
  return Partition(jump, ~jump & upstream, ~jump & ~upstream)


def shares(values: np.ndarray, kinds: Partition) -> Partition:
  """The share of the signed sum in each mask: below 0 or above 1 where signs differ.

  Args:
    values: [B, N], floats (summed without rounding between the terms) or `fractions.Fraction`s
      (dtype object; the shares are then exact).
    kinds: masks bool [B, N] that partition the tokens.

  Raises:
    ValueError: masks that do not partition the values, or a sum of zero.
  """
  values = np.asarray(values)
  for name, mask in zip(kinds._fields, kinds):
    if mask.dtype != bool or mask.shape != values.shape:
      raise ValueError(
        f"mask {name} must be bool {values.shape} as the values, got {mask.dtype} {mask.shape}."
      )
  if (np.sum(kinds, axis=0) != 1).any():
    raise ValueError("the masks must hold each token exactly once.")
  total = _sum(values.ravel())
  if total == 0:
    raise ValueError("the values sum to zero, expected a sum that shares can be taken of.")
  return Partition(*(_sum(values[mask]) / total for mask in kinds))


def signed_flip_tax(harm: np.ndarray, flipped: np.ndarray) -> FlipTax:
  """What flips cost, what they give, and how nearly the two cancel.

  Args:
    harm: floats of any shape, nats.
    flipped: bool, same shape: the tokens that count.

  Raises:
    ValueError: another shape or dtype, or harm of a flipped token that is not finite.
  """
  harm, flipped = np.asarray(harm), np.asarray(flipped)
  if flipped.dtype != bool or flipped.shape != harm.shape:
    raise ValueError(
      f"flipped must be bool {harm.shape} as harm, got {flipped.dtype} {flipped.shape}."
    )
  harm = harm[flipped]
  if not np.isfinite(harm).all():
    raise ValueError("harm of a flipped token is NaN or infinite, expected finite nats.")
  harms, benefits = harm[harm > 0], -harm[harm < 0]
  harmful, beneficial = _sum(harms), _sum(benefits)
  larger = max(harmful, beneficial)
  return FlipTax(
    harmful=harmful,
    beneficial=beneficial,
    net=harmful - beneficial,
    flips=harm.size,
    harmful_flips=harms.size,
    beneficial_flips=benefits.size,
    harmful_mean=harmful / harms.size if harms.size else None,
    beneficial_mean=beneficial / benefits.size if benefits.size else None,
    cancellation=min(harmful, beneficial) / larger if larger else None,
  )


def _sum(values: np.ndarray) -> float | fractions.Fraction:
  """Σ values: exact for fractions, rounded once for floats."""
  if values.dtype == object:
    return sum(values, fractions.Fraction(0))
  return math.fsum(values)
