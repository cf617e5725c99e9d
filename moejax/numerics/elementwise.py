"""Elementwise functions with the same float32 bits under NumPy and XLA, eager, jitted or folded.

Only IEEE + - * / sqrt, compares and integer operations are used, each correctly rounded everywhere;
`fence` and `hold` (see `backend`) keep XLA from merging or rewriting them.  Functions take and
return float32 of any shape, NumPy for NumPy and JAX for JAX; another dtype raises TypeError.

Domain: normal numbers, zeros, infinities and NaN.  XLA flushes subnormal numbers and NumPy does
not, so a subnormal argument is outside, and so is one of `silu` below 2^-125 in magnitude, where
the result is subnormal.  No intermediate value is subnormal where it could show.  Every NaN result
has the bits 0x7fc00000.

Errors are in ulps of the exact result: maxima over every fifth float32, against FP64, rounded up.
"""

import numpy as np

from moejax.numerics import backend

_NAN = np.float32(np.nan)
_INF = np.float32(np.inf)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_MIN_NORMAL = np.finfo(np.float32).smallest_normal

# ln 2 in two parts of at most 16 bits: their products with an exponent, of 8 bits, are exact.
_LN2_HIGH = np.float32(float.fromhex("0x1.62e4p-1"))
_LN2_LOW = np.float32(float.fromhex("0x1.7f7ep-20"))
_LOG2_E = np.float32(1.4426950408889634)

_EXP_LOWEST = np.float32(-87.0)  # below it the result is +0, before it would become subnormal
_EXP_HIGHEST = np.float32(88.72283172607422)  # above it exp(x) rounds to infinity
_EXP_COEFFICIENTS = [np.float32(1 / k) for k in (5040, 720, 120, 24, 6, 2)]  # 1/7! to 1/2!
_LOG_COEFFICIENTS = [np.float32(2 / k) for k in (9, 7, 5, 3)]

_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_EXPONENT_SHIFT = np.int32(23)


def _polynomial(b, x, coefficients):
  """Horner's rule, highest coefficient first."""
  result = b.xp.full_like(x, coefficients[0])
  for coefficient in coefficients[1:]:
    result = b.fence(result * x) + coefficient
  return result


def _scale_by_power_of_two(b, x, exponent):
  """x · 2^exponent for int32 `exponent` and positive normal x and result, by adding to the bits."""
  shifted = b.bits(x).astype(np.int32) + (exponent << _EXPONENT_SHIFT)
  return b.from_bits(shifted.astype(np.uint32))


def _log_of_parts(b, f, exponent, correction):
  """log((1 + f) · 2^exponent) + correction, for 1 + f in [√½, √2) and a correction below 2^-24.

  With s = f / (2 + f), log(1 + f) = 2 atanh(s) = f - (f²/2 - s (f²/2 + 2s²/3 + 2s⁴/5 + …)).  This
  is the form of FreeBSD's msun (e_logf.c): the leading term f is exact.
  """
  s = f / (f + _TWO)
  s2 = s * s
  half_f2 = (f * f) * _HALF  # halving is exact, so no fence
  series = b.fence(_polynomial(b, s2, _LOG_COEFFICIENTS) * s2)
  tail = b.fence(s * (half_f2 + series)) + (exponent * _LN2_LOW + correction)
  return exponent * _LN2_HIGH - ((half_f2 - tail) - f)


def _split_exponent(b, x):
  """Positive normal x → (m, e), float32 both, with x = m · 2^e and m in [√½, √2)."""
  bits = b.bits(x).astype(np.int32)
  exponent = (bits - _SQRT_HALF_BITS) >> _EXPONENT_SHIFT
  mantissa = b.from_bits((bits - (exponent << _EXPONENT_SHIFT)).astype(np.uint32))
  return mantissa, exponent.astype(np.float32)


def exp(x):
  """e^x, at most 1.0 ulp off.

  +0 below -87, so that a masked -inf contributes an exact zero; inf above 88.7228.
  """
  backend.require_float32("exp", x)
  b = backend.backend(x)
  xp = b.xp
  # Selects rather than minimum and maximum: a NaN must not reach the conversion to an integer.
  clamped = xp.where(x > _EXP_LOWEST, x, _EXP_LOWEST)
  clamped = xp.where(clamped < _EXP_HIGHEST, clamped, _EXP_HIGHEST)
  n = b.rint(clamped * _LOG2_E)
  high, low = clamped - n * _LN2_HIGH, n * _LN2_LOW  # both exact
  r = high - low
  curve = b.fence(_polynomial(b, r, _EXP_COEFFICIENTS) * r * r)
  y = _scale_by_power_of_two(b, ((curve - low) + high) + _ONE, n.astype(np.int32))
  y = xp.where(x < _EXP_LOWEST, _ZERO, y)
  y = xp.where(x > _EXP_HIGHEST, _INF, y)
  return xp.where(x != x, _NAN, y)


def log(x):
  """Natural logarithm, at most 0.9 ulp off.

  -inf for zeros of either sign and for subnormal numbers, which count as zero; NaN below zero.
  """
  backend.require_float32("log", x)
  b = backend.backend(x)
  xp = b.xp
  ordinary = (x >= _MIN_NORMAL) & (x < _INF)
  mantissa, exponent = _split_exponent(b, xp.where(ordinary, x, _ONE))
  y = _log_of_parts(b, mantissa - _ONE, exponent, _ZERO)
  y = xp.where(x < _MIN_NORMAL, -_INF, y)
  y = xp.where(x == _INF, _INF, y)
  return xp.where((x <= -_MIN_NORMAL) | (x != x), _NAN, y)


def log1p(x):
  """log(1 + x), at most 0.9 ulp off; +0 for zeros of either sign, -inf at -1 and NaN below."""
  backend.require_float32("log1p", x)
  b = backend.backend(x)
  xp = b.xp
  ordinary = (x > -_ONE) & (x < _INF)
  z = xp.where(ordinary, x, _ZERO)
  u = b.hold(z + _ONE)
  lost = z - (u - _ONE)  # exact below 2^24; above, too small to matter
  mantissa, exponent = _split_exponent(b, u)
  near = exponent == _ZERO
  f = xp.where(near, z, mantissa - _ONE)
  y = _log_of_parts(b, f, exponent, xp.where(near, _ZERO, lost / u))
  y = xp.where(x == -_ONE, -_INF, y)
  y = xp.where(x == _INF, _INF, y)
  return xp.where((x < -_ONE) | (x != x), _NAN, y)


def _logistic_parts(b, x):
  """(numerator, denominator) of 1 / (1 + e^-x) with no exponential above 1."""
  e = exp(-b.xp.abs(x))
  return b.xp.where(x >= _ZERO, _ONE, e), e + _ONE


def sigmoid(x):
  """1 / (1 + e^-x), at most 2.5 ulp off; +0 below -87."""
  backend.require_float32("sigmoid", x)
  numerator, denominator = _logistic_parts(backend.backend(x), x)
  return numerator / denominator


def silu(x):
  """x · sigmoid(x), at most 3.2 ulp off; -0 below -87 and at -inf, where the limit is zero."""
  backend.require_float32("silu", x)
  b = backend.backend(x)
  numerator, denominator = _logistic_parts(b, x)
  # -inf · 0 would be NaN.
  bounded = b.xp.where(x > _EXP_LOWEST - _ONE, x, _EXP_LOWEST - _ONE)
  return bounded * numerator / denominator


def softplus(x):
  """log(1 + e^x), at most 1.7 ulp off; +0 below -87."""
  backend.require_float32("softplus", x)
  xp = backend.backend(x).xp
  return xp.where(x > _ZERO, x, _ZERO) + log1p(exp(-xp.abs(x)))


def sqrt_softplus(x):
  """√(log(1 + e^x)), the router score of DeepSeek-V4, at most 1.4 ulp off; +0 below -174.

  Far below zero softplus is e^x, which leaves the normal numbers long before its root does: there
  the root is taken in the exponent.
  """
  backend.require_float32("sqrt_softplus", x)
  xp = backend.backend(x).xp
  # At -20 the two differ by e^x / 4 = 2^-31 in relative terms.
  return xp.where(x < np.float32(-20.0), exp(x * _HALF), xp.sqrt(softplus(x)))
