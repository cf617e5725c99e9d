"""Rounding to BF16 and distances in units in the last place, on integer bits.

Integers make the results independent of rounding modes, flush-to-zero and the compiler: bits are
the same under NumPy, eager XLA, `jit`, `vmap` and `scan`, and subnormals are kept everywhere.
"""

import numpy as np

from moejax.numerics import backend, layout

_LOW_HALF = np.uint32(0x0000FFFF)
_QUIET = np.uint32(0x00400000)
_NOT_A_DISTANCE = np.uint32(0xFFFFFFFF)


def round_bf16(x):
  """Rounds float32 to BF16 values, to nearest, ties to even, overflowing to infinity.

  The software rule of the reduction paper (section 2.2.3), except for NaN. That rule only clears
  the low half, which turns a NaN whose payload sits there into an infinity; ours is made quiet.
  Inference only: integer bits carry no gradient.

  Args:
    x: float32, any shape; subnormals included.

  Returns:
    float32 of x's shape, whose low halves are zero; equal to the cast to bfloat16 and back.

  Raises:
    TypeError: x is not float32.
  """
  backend.require_float32("round_bf16", x)
  b = backend.backend(x)
  u = b.bits(x)
  is_nan = (u & layout.MAGNITUDE) > layout.INFINITY
  # With its low half clear a NaN passes the rounding below unchanged, and no addition wraps around.
  u = b.xp.where(is_nan, (u | _QUIET) & layout.HIGH_HALF, u)
  ties_to_even = (u >> 16) & 1
  return b.from_bits((u + 0x7FFF + ties_to_even) & layout.HIGH_HALF)


def is_bf16(x):
  """bool of x's shape: the float32 value is a BF16 value, that is, its low half is zero."""
  backend.require_float32("is_bf16", x)
  return (backend.backend(x).bits(x) & _LOW_HALF) == 0


def ulp_distance(a, b):
  """Steps from a to b along the float32 numbers; -0 and +0 are one number, FLT_MAX is next to inf.

  Args:
    a, b: float32, of shapes that broadcast.

  Returns:
    The distance: int64 under NumPy; uint32 under XLA, where it fits, being at most 0xff000000.

  Raises:
    TypeError: an operand is not float32.
    ValueError: an operand holds a NaN. XLA cannot raise and returns 2^32 - 1, which is no distance.
  """
  return _distance("ulp_distance", a, b, step_bits=0)


def ulp_bf16_distance(a, b):
  """Steps from a to b along the BF16 numbers, as `ulp_distance`.

  Args:
    a, b: float32 of BF16 values, of shapes that broadcast.

  Returns:
    The distance, at most 65280: int64 under NumPy, uint32 under XLA.

  Raises:
    TypeError: an operand is not float32.
    ValueError: an operand holds a NaN or a value that is not BF16. XLA cannot raise and returns
      2^32 - 1 for both.
  """
  return _distance("ulp_bf16_distance", a, b, step_bits=16)


def _distance(name, x, y, step_bits):
  backend.require_float32(name, x)
  backend.require_float32(name, y)
  b = backend.backend(x, y)
  u, v = b.bits(x), b.bits(y)
  is_number = _is_number(u, step_bits) & _is_number(v, step_bits)
  if b is backend.NumpyBackend and not is_number.all():
    raise ValueError(f"{name}: expected {'BF16 values' if step_bits else 'numbers'}, not NaN.")
  m, n = (u & layout.MAGNITUDE) >> step_bits, (v & layout.MAGNITUDE) >> step_bits
  # By cases on the signs, so that the unsigned arithmetic neither wraps nor needs a 33rd bit.
  apart = b.xp.where((u ^ v) > layout.MAGNITUDE, m + n, b.xp.maximum(m, n) - b.xp.minimum(m, n))
  if b is backend.NumpyBackend:
    return apart.astype(np.int64)
  return b.xp.where(is_number, apart, _NOT_A_DISTANCE)


def _is_number(u, step_bits):
  return ((u & layout.MAGNITUDE) <= layout.INFINITY) & ((u & np.uint32((1 << step_bits) - 1)) == 0)
