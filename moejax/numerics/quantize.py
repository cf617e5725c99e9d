"""Simulated quantisers: symmetric integer grids, and DeepSeek-V4's activation quantisation."""

import jax
import numpy as np

from moejax.numerics import backend, formats, layout

# Floors of the group maximum in DeepSeek's reference code, so that a scale is never zero.
_QDQ8_FLOOR = np.float32(1e-4)
_QDQ4_FLOOR = np.float32(6 * 2.0**-126)


# Symmetric integer grids.


def fake_quantize(x, bits, axis: int = -1, group: int | None = None, strength=1.0):
  """Rounds x to a symmetric grid of 2^bits levels, or goes part of the way.

    delta = max|x| / (2^(bits-1) - 1),  q = clip(rint(x / delta), -2^(bits-1), 2^(bits-1) - 1),
    result = x + strength · (q·delta - x),   each operation rounded to float32, ties to even

  The simulated KV quantiser of the route paper (there bits = 4, over the channels of a head), which
  leaves arithmetic, ties and the precision of delta open: float32 and ties to even are our choices.
  The level -2^(bits-1) is never reached.

  Domain: |x| < 2^127, and in each group a delta of 0 or at least 2^-126. For strengths other than 0
  and 1, also no nonzero x, difference or product below 2^-126, which XLA flushes to zero.

  Args:
    x: float32, any shape.
    bits: 2 to 8; or an int32 array of such that broadcasts to x without the axis, an operand whose
      values are not checked.
    axis: the axis that shares a delta.
    group: consecutive elements of that axis which share a delta; must divide it. None: all of it.
    strength: float32 (or a Python number), scalar or of a shape that broadcasts to x's. An operand:
      one compiled program serves a sweep. 0 gives x bit for bit, 1 gives q·delta exactly.

  Returns:
    float32 of x's shape. A group of zeros gives +0 at strength 1.

  Raises:
    TypeError: x or strength is not float32.
    ValueError: bits outside 2 to 8, no such axis, a group that does not divide it, or a strength
      that does not broadcast.
  """
  backend.require_float32("fake_quantize", x)
  if not isinstance(bits, jax.Array | np.ndarray) and bits not in range(2, 9):
    raise ValueError(f"fake_quantize: bits must be 2 to 8, got {bits}.")
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(f"fake_quantize: axis {axis} is not an axis of shape {x.shape}.")
  if isinstance(strength, int | float):
    strength = np.float32(strength)
  backend.require_float32("fake_quantize: strength", strength)
  _require_broadcast("fake_quantize", strength, x)
  b = backend.backend(x, strength)
  levels = (b.xp.left_shift(np.int32(1), b.xp.asarray(bits, np.int32) - 1)).astype(np.float32)
  moved = b.xp.moveaxis(x, axis, -1)
  groups = _split_groups("fake_quantize", moved, group)
  levels = levels[..., None, None] if levels.ndim else levels
  quantized = _quantize_groups(b, groups, levels).reshape(moved.shape)
  quantized = b.xp.moveaxis(quantized, -1, axis)
  strength = b.xp.broadcast_to(strength, x.shape)
  partly = x + b.fence(strength * (quantized - x))
  return b.xp.where(strength == 0, x, b.xp.where(strength == 1, quantized, partly))


def _quantize_groups(b, groups, levels):
  """Rounds each [..., group] to multiples of its delta, -levels to levels - 1 of them.

  levels is float32 and broadcasts to the groups.
  """
  largest = b.xp.abs(groups).max(axis=-1, keepdims=True)
  top = b.xp.broadcast_to(levels - np.float32(1), largest.shape)
  delta = b.divide(largest, top)
  ratio = b.divide(groups, b.xp.where(delta == 0, np.float32(1), delta))
  q = b.xp.clip(b.rint(ratio), -levels, top)
  return b.xp.where(delta == 0, np.float32(0), b.fence(q * delta))


def _require_broadcast(name: str, strength, x) -> None:
  pairs = zip(strength.shape[::-1], x.shape[::-1])
  if strength.ndim > x.ndim or any(s not in (1, n) for s, n in pairs):
    raise ValueError(f"{name}: strength {strength.shape} does not broadcast to x {x.shape}.")


# Simulated activation quantisation (DeepSeek-V4's reference inference code).


def qdq_fp8(x, group: int = 128):
  """Quantises activations to FP8 with a power-of-two scale per group, and back.

    a = max(max|x|, 1e-4),  s = 2^ceil(log2(a / 448)),  result = s · e4m3(x / s),  ties to even

  The exponent is exact, from the bits of a. A group that holds a NaN or an infinity becomes NaN.

  Args:
    x: float32 [..., n].
    group: consecutive elements of the last axis that share a scale; must divide it.

  Returns:
    float32 of x's shape. Zeros keep their sign.

  Raises:
    TypeError: x is not float32.
    ValueError: the group does not divide the last axis.
  """
  return _qdq("qdq_fp8", x, group, _QDQ8_FLOOR, np.float32(448), _round_e4m3)


def qdq_fp4(x, group: int = 32, ties: str = "even"):
  """Quantises activations to FP4 with a power-of-two scale per group, and back.

    a = max(max|x|, 6 · 2^-126),  s = 2^ceil(log2(a / 6)),  result = s · e2m1(x / s)

  The exponent is exact, from the bits of a. A group that holds a NaN or an infinity becomes NaN.

  Args:
    x: float32 [..., n].
    group: consecutive elements of the last axis that share a scale; must divide it.
    ties: "even", as hardware rounds, keeping the sign of what becomes zero; or "zero", toward zero
      and never -0, as a C runtime scans the table. They differ at |x / s| = 0.75, 1.75 and 3.5.

  Returns:
    float32 of x's shape.

  Raises:
    TypeError: x is not float32.
    ValueError: the group does not divide the last axis, or ties is neither "even" nor "zero".
  """
  if ties not in ("even", "zero"):
    raise ValueError(f'qdq_fp4: ties must be "even" or "zero", got {ties!r}.')
  round_e2m1 = _round_e2m1_to_even if ties == "even" else _round_e2m1_to_zero
  return _qdq("qdq_fp4", x, group, _QDQ4_FLOOR, np.float32(6), round_e2m1)


def _qdq(name, x, group, floor, top, round_to_format):
  """Rounds each group after scaling it by a power of two to within ±top, the format's largest."""
  backend.require_float32(name, x)
  b = backend.backend(x)
  groups = _split_groups(name, x, group)
  qdq = _qdq_groups if b is backend.NumpyBackend else _qdq_groups_xla
  return qdq(b, groups, floor, top, round_to_format).reshape(x.shape)


def _qdq_groups(b, groups, floor, top, round_to_format):
  # The maximum of the bits: integer order is the order of magnitudes, subnormals included.
  largest = (b.bits(groups) & layout.MAGNITUDE).max(axis=-1, keepdims=True)
  u, t = b.xp.maximum(largest, floor.view(np.uint32)), top.view(np.uint32)
  exponent = (u >> 23).astype(np.int32) - np.int32(t >> 23)
  exponent = exponent + ((u & layout.FRACTION) > (t & layout.FRACTION)).astype(np.int32)
  rounded = round_to_format(b, formats.times_power_of_two(b, groups, -exponent))
  result = formats.times_power_of_two(b, rounded, exponent)
  return b.from_bits(b.xp.where(largest >= layout.INFINITY, layout.NAN, b.bits(result)))


_qdq_groups_xla = jax.jit(_qdq_groups, static_argnums=(0, 2, 3, 4))


def _round_e4m3(b, x):
  """Rounds |x| ≤ 448 to float8_e4m3fn, to nearest, ties to even, in float32."""
  u = b.bits(x)
  # Drops 20 of the 23 fraction bits; a carry runs into the exponent field, as it should.
  normal = b.from_bits((u + 0x7FFFF + ((u >> 20) & 1)) & np.uint32(0xFFF00000))
  subnormal = b.rint(x * np.float32(2.0**9)) * np.float32(2.0**-9)
  return b.xp.where((u & layout.MAGNITUDE) < np.float32(2.0**-6).view(np.uint32), subnormal, normal)


def _round_e2m1_to_even(b, x):
  # Below 0.25 comes code 0, at 0.75 the even code 2, and so on: every second midpoint rounds up.
  m = b.xp.abs(x)
  up = [m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5]
  return b.from_bits(b.bits(_fp4_value(b, up)) | (b.bits(x) & layout.SIGN))


def _round_e2m1_to_zero(b, x):
  m = b.xp.abs(x)
  value = _fp4_value(b, [m > t for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)])
  return b.xp.where((x < 0) & (value > 0), -value, value)


def _fp4_value(b, above):
  """The magnitude whose code is the number of midpoints that lie below."""
  return b.xp.asarray(formats.FP4_VALUES)[sum(one.astype(np.int32) for one in above)]


# Both.


def _split_groups(name, x, group):
  """[..., n] → [..., n / group, group]; None is one group."""
  if x.ndim == 0:
    raise ValueError(f"{name}: expected x [..., n], got a scalar.")
  width = x.shape[-1]
  size = width if group is None else group
  if size < 1 or width % size:
    raise ValueError(f"{name}: groups of {size} do not divide an axis of {width}.")
  return x.reshape(*x.shape[:-1], width // size, size)
