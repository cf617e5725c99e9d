"""Sums, softmax and RMS norm over the last axis, with the same float32 bits in every program.

The canonical row sum is a halving tree: the row is padded with zeros to a power of two, then its
second half is added to its first until one element is left.  Each addition is an elementwise one,
so neither the number of rows nor `jit`, `vmap` or `lax.map` can change a bit, and further zeros at
the end of the row change nothing.

Rows are float32 [..., N] with N ≥ 1; another dtype raises TypeError, an empty row ValueError.  The
domain is that of `elementwise`: where a sum, product or quotient is subnormal XLA flushes it.

Errors are in units of u = 2^-24, half an ulp of 1, with n = ⌈log₂ N⌉.
"""

import numpy as np

from moejax.numerics import backend, domain, elementwise

_NAN = np.float32(np.nan)
_INF = np.float32(np.inf)
_ZERO = np.float32(0.0)
_SMALLEST_PROBABILITY = np.float32(2.0**-125)


def _require_rows(name, x, axis=-1):
  backend.require_float32(name, x)
  if x.ndim == 0 or x.shape[axis] == 0:
    raise ValueError(f"{name}: expected rows [..., N] with N at least 1, got shape {x.shape}.")


def tree_sum(x, *, axis=-1, keepdims=False):
  """Halving-tree sum over an axis: float32 [..., N] → [...], or [..., 1] with `keepdims`.

  At most n u Σ|x| off.  A zero sum is +0, whatever the signs, so that zeros at the end of a row
  never show.  Inexact products must be fenced by the caller.  The axis is the last one or the
  first: of many short rows XLA sums the first several times faster.
  """
  if axis not in (0, -1):
    raise ValueError(f"tree_sum: the axis must be 0 or -1, got {axis}.")
  _require_rows("tree_sum", x, axis)
  if domain.checking():
    xp = backend.backend(x).xp
    x = xp.moveaxis(domain.check_rows("tree_sum", xp.moveaxis(x, axis, -1)), -1, axis)
  total = _tree_sum(x, axis)
  return total if keepdims else total.squeeze(axis)


def _tree_sum(x, axis=-1):
  """`tree_sum` with keepdims, unchecked."""
  xp = backend.backend(x).xp
  length = x.shape[axis]
  width = 1 << (length - 1).bit_length()
  part = lambda *bounds: (slice(*bounds),) if axis == 0 else (..., slice(*bounds))
  if width > length:
    zeros = xp.zeros_like(x[part(width - length)])
    x = xp.concatenate([x, zeros], axis=axis)
  while width > 1:
    width //= 2
    x = x[part(width)] + x[part(width, None)]
  return xp.where(x == _ZERO, _ZERO, x)


def _shifted(xp, x, instead):
  """(x - shift, shift): the shift is the row's maximum if that is finite, else `instead`."""
  maximum = x.max(axis=-1, keepdims=True)
  shift = xp.where(xp.abs(maximum) < _INF, maximum, instead)
  return x - shift, shift


def softmax(x):
  """e^x / Σ e^x over the last axis: float32 [..., N] → [..., N].

  At most (max x - x + n + 6) u off in relative terms, and +0 where the result would be below 2^-125
  or x is more than 87 below the maximum.  Padding a row with -inf changes no bit and yields +0
  there.  A row without a finite maximum (all -inf, or a +inf or NaN somewhere) is NaN everywhere.
  """
  _require_rows("softmax", x)
  b = backend.backend(x)
  shifted, _ = _shifted(b.xp, x, _NAN)
  e = elementwise.exp(shifted)
  probability = b.divide(e, _tree_sum(e))
  # Not 2^-126: just below it, XLA's flush and a rounding to subnormal numbers may disagree.
  return b.xp.where(probability < _SMALLEST_PROBABILITY, _ZERO, probability)


def logsumexp(x, *, keepdims=False):
  """log Σ e^x over the last axis: float32 [..., N] → [...], or [..., 1] with `keepdims`.

  At most (n + 4) u off, relative to the result or to 1 if that is smaller.  -inf for a row of -inf,
  which is the logarithm of an empty sum; +inf for a row with a +inf.
  """
  _require_rows("logsumexp", x)
  xp = backend.backend(x).xp
  shifted, shift = _shifted(xp, x, _ZERO)
  total = elementwise.log(_tree_sum(elementwise.exp(shifted))) + shift
  return total if keepdims else total[..., 0]


def log_softmax(x):
  """x - log Σ e^x over the last axis, in nats: float32 [..., N] → [..., N].

  At most (n + 4) u off, relative to the result or to 1 if that is smaller.  -inf where x is; NaN
  everywhere in a row without a finite maximum, as for `softmax`.
  """
  _require_rows("log_softmax", x)
  xp = backend.backend(x).xp
  shifted, _ = _shifted(xp, x, _NAN)
  return shifted - elementwise.log(_tree_sum(elementwise.exp(shifted)))


def rms_norm(x, weight=None, *, eps):
  """x / √(mean(x²) + eps), times the weight if there is one: float32 [..., N] → [..., N].

  Args:
    x: float32 [..., N], finite, with a finite sum of squares.
    weight: float32 [N].  Models that round between the norm and its weight leave it out.
    eps: positive; 1e-20 is enough to swallow the squares that XLA flushes.

  Returns:
    float32 [..., N], at most (n / 2 + 5) u off in relative terms.  With a weight it ends in a
    product: fence it before adding to it.
  """
  _require_rows("rms_norm", x)
  b = backend.backend(x)
  normed = b.divide(x, root_mean_square(x, eps=eps))
  if weight is None:
    return normed
  backend.require_float32("rms_norm: weight", weight)
  return normed * b.xp.broadcast_to(weight, x.shape)


def root_mean_square(x, *, eps):
  """√(mean(x²) + eps) over the last axis: float32 [..., N] → [..., 1].  See `rms_norm`."""
  _require_rows("root_mean_square", x)
  b = backend.backend(x)
  # Outside the domain check: eps swallows the squares that XLA flushes.
  sum_of_squares = _tree_sum(b.fence(x * x))
  mean = b.divide(sum_of_squares, np.float32(x.shape[-1]))
  return b.xp.sqrt(mean + np.float32(eps))
