"""Correctly rounded float32 sums and dot products: the exact real result, rounded once.

A superaccumulator: the sum is held as a whole number of units, the smallest bit that any term can
have, in limbs of 16 bits inside int32. Every step is integer arithmetic, so the order of the terms
cannot matter, flush-to-zero cannot reach a subnormal, and NumPy, eager XLA, `jit` and `vmap` agree.

`N` is the magnitude of the exact sum in units, `L` its length in bits.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import backend, layout

# A limb receives at most 2^16 - 1 from each term: 2^14 terms and the carries stay far inside int32.
MAX_TERMS = 2**14

_LIMB_BITS = 16
# Bits: the largest exponent, a significand, 14 for 2^14 terms, a sign. A unit is 2^-149 for a sum
# (253 + 24 + 14 + 1) and 2^-298 for a dot (506 + 48 + 14 + 1).
_SUM_LIMBS = -(-292 // _LIMB_BITS)
_DOT_LIMBS = -(-569 // _LIMB_BITS)


def exact_sum(terms, axis: int = 0):
  """The exact sum of float32 terms, rounded once to nearest, ties to even.

  Args:
    terms: float32, at most 2^14 along `axis`; subnormals count exactly.
    axis: the axis to sum.

  Returns:
    float32 without that axis. An exact sum of zero is +0, whatever the zeros' signs; beyond the
    float32 range it is infinite. Any NaN, or infinities of both signs, give NaN; otherwise an
    infinite term gives itself.

  Raises:
    TypeError: terms are not float32.
    ValueError: no such axis, or more than 2^14 terms.
  """
  backend.require_float32("exact_sum", terms)
  axis = _require_axis("exact_sum", terms, axis)
  is_numpy = backend.backend(terms) is backend.NumpyBackend
  return (_exact_sum if is_numpy else _exact_sum_xla)(terms, axis)


def exact_dot(a, b, axis: int = -1):
  """The exact sum of the exact products a·b along an axis, rounded once to nearest, ties to even.

  Args:
    a, b: float32 of one shape, at most 2^14 along `axis`; subnormals count exactly.
    axis: the axis to sum.

  Returns:
    float32 without that axis; zeros, infinities and NaN as in `exact_sum`, with 0 · inf = NaN.

  Raises:
    TypeError: an operand is not float32.
    ValueError: shapes differ, no such axis, or more than 2^14 products.
  """
  backend.require_float32("exact_dot", a)
  backend.require_float32("exact_dot", b)
  if a.shape != b.shape:
    raise ValueError(f"exact_dot: a {a.shape} and b {b.shape} must have one shape.")
  axis = _require_axis("exact_dot", a, axis)
  is_numpy = backend.backend(a, b) is backend.NumpyBackend
  return (_exact_dot if is_numpy else _exact_dot_xla)(a, b, axis)


def _exact_sum(terms, axis):
  b = backend.backend(terms)
  u = b.bits(terms)
  magnitude = u & layout.MAGNITUDE
  significand, exponent = _significand_and_exponent(b, magnitude)
  is_negative = u >= layout.SIGN
  digits = _accumulate(b, [(significand, exponent)], is_negative, _SUM_LIMBS, axis)
  rounded = _round(b, digits, unit_exponent=0)
  is_inf, is_nan = magnitude == layout.INFINITY, magnitude > layout.INFINITY
  return b.from_bits(_resolve_specials(rounded, is_inf, is_nan, is_negative, axis, b))


def _exact_dot(x, y, axis):
  b = backend.backend(x, y)
  u, v = b.bits(x), b.bits(y)
  m, n = u & layout.MAGNITUDE, v & layout.MAGNITUDE
  (m_significand, m_exponent), (n_significand, n_exponent) = (
    _significand_and_exponent(b, magnitude) for magnitude in (m, n)
  )
  low, high = _multiply(m_significand, n_significand)
  exponent = m_exponent + n_exponent
  is_negative = (u ^ v) >= layout.SIGN
  words = [(low, exponent), (high, exponent + 24)]
  digits = _accumulate(b, words, is_negative, _DOT_LIMBS, axis)
  rounded = _round(b, digits, unit_exponent=-149)
  is_inf = (m == layout.INFINITY) | (n == layout.INFINITY)
  is_nan = (m > layout.INFINITY) | (n > layout.INFINITY) | (is_inf & ((m == 0) | (n == 0)))
  return b.from_bits(_resolve_specials(rounded, is_inf, is_nan, is_negative, axis, b))


_exact_sum_xla = jax.jit(_exact_sum, static_argnums=1)
_exact_dot_xla = jax.jit(_exact_dot, static_argnums=2)


def _require_axis(name: str, x, axis: int) -> int:
  """The axis counted from the front, after refusing what the limbs cannot hold."""
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(f"{name}: axis {axis} is not an axis of shape {x.shape}.")
  if x.shape[axis] > MAX_TERMS:
    raise ValueError(f"{name}: {x.shape[axis]} terms exceed the {MAX_TERMS} that limbs can hold.")
  return axis % x.ndim


def _significand_and_exponent(b, magnitude):
  """|x| = significand · 2^exponent units of 2^-149: uint32 below 2^24, int32 from 0."""
  field = magnitude >> 23
  fraction = magnitude & 0x7FFFFF
  significand = b.xp.where(field == 0, fraction, fraction | 0x800000)
  return significand, b.xp.maximum(field, np.uint32(1)).astype(np.int32) - 1


def _multiply(m, n):
  """The product of two 24-bit significands, from 12-bit halves, as (low, high) words of 24 bits."""
  m_low, m_high, n_low, n_high = m & 0xFFF, m >> 12, n & 0xFFF, n >> 12
  middle = m_low * n_high + m_high * n_low
  low = m_low * n_low + ((middle & 0xFFF) << 12)
  high = m_high * n_high + (middle >> 12) + (low >> 24)
  return low & 0xFFFFFF, high


def _shift(b, words, places):
  """words · 2^places for any int32 places, rounded down; bits from 2^32 on are lost."""
  left, right = (b.xp.clip(p, 0, 31).astype(np.uint32) for p in (places, -places))
  return (words << left) >> right


def _accumulate(b, words, is_negative, num_limbs, axis):
  """Sums terms along `axis` into int32 digits [limb, ...].

  A term is the signed sum of its `words`, (uint32 of at most 24 bits, int32 exponent), whose bits
  do not overlap.
  """

  def digit(limb):
    # A place of 16 or more leaves the low half zero: the mask also drops what lies below the limb.
    pieces = [_shift(b, word, exponent - _LIMB_BITS * limb) & 0xFFFF for word, exponent in words]
    piece = functools.reduce(lambda p, q: p | q, pieces).astype(np.int32)
    return b.xp.where(is_negative, -piece, piece).sum(axis=axis, dtype=np.int32)

  # One at a time in NumPy, to spare memory; one fused reduction in XLA, to spare the compiler.
  if b is backend.NumpyBackend:
    return np.stack([digit(limb) for limb in range(num_limbs)])
  return jax.vmap(digit)(jnp.arange(num_limbs, dtype=jnp.int32))


def _carry(b, digits):
  """Propagates carries: (uint32 limbs of 16 bits [limb, ...], the last carry, -1 if negative)."""

  def step(carry, digit):
    total = digit + carry  # shifted arithmetically, that is, rounded down: limbs are never negative
    return total >> _LIMB_BITS, (total & 0xFFFF).astype(np.uint32)

  carry = b.xp.zeros_like(digits[0])
  if b is backend.XlaBackend:
    carry, limbs = lax.scan(step, carry, digits)
    return limbs, carry
  limbs = []
  for digit in digits:
    carry, limb = step(carry, digit)
    limbs.append(limb)
  return np.stack(limbs), carry


def _round(b, digits, unit_exponent):
  """float32 bits (uint32) of the sum of digits · 2^(16 limb) units of 2^(unit_exponent - 149)."""
  is_negative = _carry(b, digits)[1] < 0
  limbs, _ = _carry(b, b.xp.where(is_negative[None], -digits, digits))
  # Bits of N to drop: all but 24, and at least those below 2^-149, the last place of a subnormal.
  drop = b.xp.maximum(_length(b, limbs) - 24, np.int32(-unit_exponent))
  # One more bit than the significand is kept, to see on which side of a tie the rest lies.
  place = _LIMB_BITS * _limb_index(b, limbs) - (drop - 1)
  kept = _shift(b, limbs, place)
  is_inexact = (_shift(b, kept, -place) != limbs).any(axis=0)
  kept = kept.sum(axis=0, dtype=np.uint32)
  significand = kept >> 1
  round_up = (kept & 1) & (is_inexact | (significand & 1 == 1)).astype(np.uint32)
  # The significand's leading bit adds one to the exponent field, and so does a carry out of it.
  field = (drop[0] + unit_exponent).astype(np.uint32)
  magnitude = b.xp.minimum((field << 23) + significand + round_up, layout.INFINITY)
  return b.xp.where(is_negative, magnitude | layout.SIGN, magnitude)


def _limb_index(b, limbs):
  """int32 [limb, 1, ...]: 0, 1, 2, ... along the leading axis."""
  return b.xp.arange(limbs.shape[0], dtype=np.int32).reshape(-1, *(1,) * (limbs.ndim - 1))


def _length(b, limbs):
  """L, int32 [1, ...]: the length in bits of the number in limbs [limb, ...]; 0 for zero."""
  # A 16-bit integer is exact in float32, whose exponent field says where its leading bit is.
  length = (b.bits(limbs.astype(np.float32)) >> 23).astype(np.int32) - 126
  ends = b.xp.where(limbs == 0, 0, _LIMB_BITS * _limb_index(b, limbs) + length)
  return ends.max(axis=0, keepdims=True)


def _resolve_specials(rounded, is_inf, is_nan, is_negative, axis, b):
  """Replaces the bits of a finite sum where a term is infinite or NaN."""
  is_plus = (is_inf & ~is_negative).any(axis=axis)
  is_minus = (is_inf & is_negative).any(axis=axis)
  bits = b.xp.where(
    is_plus, layout.INFINITY, b.xp.where(is_minus, layout.INFINITY | layout.SIGN, rounded)
  )
  return b.xp.where(is_nan.any(axis=axis) | (is_plus & is_minus), layout.NAN, bits)
