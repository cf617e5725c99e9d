"""Proof that no order of a sum can change a bit, element by element, or two orders that differ.

The rule. Let every operand be a multiple of a unit u, a power of two, and let no subset sum exceed
2^p · u in magnitude, p the significand bits of the accumulator. Then every partial sum of every
order is a multiple of u that fits p bits: no addition rounds, and all orders give the exact sum. u
is the last set bit of any operand (not its unit in the last place), and the largest subset sums are
those of the positive and of the negative operands alone; for BF16 operands in an FP32 accumulator
it holds whenever exponents spread by at most 16 − ceil(log2 k), the rule of thumb
`exponent_spread_rule`.

Zeros never matter. What is left of at most two operands cannot be reordered where the first pair
commutes, nor one operand anywhere, whatever rounds. Infinities and NaN are not certified.
"""

import jax
import numpy as np

from moejax.combine.contract import Contract
from moejax.combine.enumeration import combine_all_orders
from moejax.combine.orders import class_representatives, MAX_ENUMERATED_TERMS, sample_orders
from moejax.combine.reduce import check_finite_terms
from moejax.numerics import backend, layout

_PRECISION = {"float32": 24, "bfloat16": 8}
# Exponent of the last bit an accumulator can hold: the subnormal unit.
_SMALLEST_UNIT = {"float32": -149, "bfloat16": -133}


def certify(terms, contract: Contract):
  """For each element: every order of a sequential sum provably gives the same bits.

  Args:
    terms: float32 [K, H], NumPy or jax (also traced), K ≤ 16.
    contract: its operand rounding is applied first; the certificate speaks about the accumulator.

  Returns:
    bool [H]. False is no claim.
  """
  check_finite_terms("certify", terms, allow_nan=True, batched=False)
  ops = backend.backend(terms)
  operands = contract.round_operand(terms)
  if contract.accumulator == "exact":
    return ops.xp.ones(terms.shape[1:], bool)
  finite = (ops.bits(operands) & layout.INFINITY) != layout.INFINITY
  nonzero = (ops.bits(operands) & layout.MAGNITUDE) != np.uint32(0)
  count = nonzero.sum(axis=0, dtype=np.int32)
  few = count <= (2 if contract.first_pair_commutes else 1)
  return finite.all(axis=0) & (few | _sums_exactly(operands, contract))


def _sums_exactly(operands, contract):
  """Whether every partial sum of every order fits the accumulator; see the module."""
  ops = backend.backend(operands)
  xp = ops.xp
  significand, unit = _integers(xp, ops.bits(operands))
  nonzero = significand != 0
  # The unit of a zero must not count: larger than any other.
  common = xp.where(nonzero, unit, np.int32(512)).min(axis=0)
  shift = xp.where(nonzero, unit - common[None], np.int32(0))
  # Beyond 2^26 no operand fits 24 bits, and 16 of them at 2^26 still fit 31.
  top = np.int32(1 << 26)
  scaled = xp.minimum(xp.where(shift > 26, top, significand), top)
  fits = scaled <= (top >> xp.minimum(shift, np.int32(26)))
  scaled = xp.where(fits, scaled << xp.minimum(shift, np.int32(26)), top)
  negative = (ops.bits(operands) >> 31).astype(np.int32)
  largest = xp.maximum(
    (scaled * (1 - negative)).sum(axis=0, dtype=np.int32),
    (scaled * negative).sum(axis=0, dtype=np.int32),
  )
  bound = np.int32(1 << _PRECISION[contract.accumulator])
  holds_unit = common >= np.int32(_SMALLEST_UNIT[contract.accumulator])
  # 2^p u itself must stay below 2^128.
  no_overflow = common + np.int32(_PRECISION[contract.accumulator]) < np.int32(128)
  return (largest <= bound) & holds_unit & no_overflow


def _integers(xp, bits):
  """|x| as an odd significand (0 for zero) times a power of two: int32 [K, H] each."""
  exponent = ((bits >> 23) & np.uint32(0xFF)).astype(np.int32)
  fraction = (bits & layout.FRACTION).astype(np.int32)
  significand = xp.where(exponent > 0, fraction | np.int32(1 << 23), fraction)
  unit = xp.maximum(exponent, np.int32(1)) - np.int32(150)
  for step in (16, 8, 4, 2, 1):  # trailing zeros, by halving
    low = (significand & np.int32((1 << step) - 1)) == 0
    even = low & (significand != 0)
    significand = xp.where(even, significand >> step, significand)
    unit = xp.where(even, unit + np.int32(step), unit)
  return significand, unit


def exponent_spread_rule(terms, contract: Contract):
  """The rule of thumb, for comparison with `certify`: e_max − e_min ≤ p − p_operand − ceil(log2 K).

  For BF16 operands in an FP32 accumulator the bound is 16 − ceil(log2 K). bool [H], NumPy or jax.
  """
  check_finite_terms("exponent_spread_rule", terms, allow_nan=True, batched=False)
  ops = backend.backend(terms)
  xp = ops.xp
  bits = ops.bits(contract.round_operand(terms))
  exponent = ((bits >> 23) & np.uint32(0xFF)).astype(np.int32)
  zero = (bits & layout.MAGNITUDE) == np.uint32(0)
  low = xp.where(zero, np.int32(255), exponent).min(axis=0)
  high = exponent.max(axis=0)
  spread = _PRECISION[contract.accumulator] - _PRECISION[contract.operand]
  bound = np.int32(spread - (terms.shape[0] - 1).bit_length())
  # Subnormals and sums near overflow are left out: the rule is about exponents.
  inside = (low > 0) & (high < np.int32(250))
  return zero.all(axis=0) | (inside & (high - low <= bound))


def counterexample(
  terms, contract: Contract, *, num_orders: int = 5040, key: jax.Array | None = None
) -> tuple[np.ndarray, np.ndarray, int] | None:
  """Two orders and an element at which they differ, or None if none was found.

  All classes are tried for K ≤ 8, otherwise `num_orders` sampled ones (then `key` is needed and
  None is no proof). Of all elements that differ the lowest is returned, with the lowest order that
  departs from the first.
  """
  terms = check_finite_terms("counterexample", terms, allow_nan=False, batched=False)
  open_at = np.flatnonzero(~np.asarray(certify(terms, contract)))
  if open_at.size == 0:
    return None
  if terms.shape[0] <= MAX_ENUMERATED_TERMS:
    orders = class_representatives(terms.shape[0], contract)
  elif key is None:
    raise ValueError(f"counterexample: {terms.shape[0]} terms are sampled; pass key=.")
  else:
    orders = sample_orders(terms.shape[0], num_orders, contract, key=key)
  for at in np.array_split(open_at, -(-open_at.size // 512)):
    bits = np.asarray(combine_all_orders(terms[:, at], contract, orders=orders)[1]).view(np.uint32)
    differs = bits != bits[:1]
    if differs.any():
      column = int(np.argmax(differs.any(axis=0)))
      row = int(np.argmax(differs[:, column]))
      return orders[0], orders[row], int(at[column])
  return None
