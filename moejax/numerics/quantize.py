"""Simulated quantisers, and the number formats of quantised checkpoints: FP8, FP4 and E8M0.

E8M0 is a power of two, 2^(code - 127), stored as its exponent field. Multiplying by one works on
integer bits: factor, operand or product may be subnormal, and XLA flushes those to zero.
"""

import jax
import numpy as np

from moejax.numerics import backend

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_FRACTION = np.uint32(0x007FFFFF)
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)

_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

# Floors of the group maximum in DeepSeek's reference code, so that a scale is never zero.
_QDQ8_FLOOR = np.float32(1e-4)
_QDQ4_FLOOR = np.float32(6 * 2.0**-126)


# Symmetric integer grids.


def fake_quantize(x, bits: int, axis: int = -1, group: int | None = None, strength=1.0):
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
    bits: 2 to 8.
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
  if bits not in range(2, 9):
    raise ValueError(f"fake_quantize: bits must be 2 to 8, got {bits}.")
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(f"fake_quantize: axis {axis} is not an axis of shape {x.shape}.")
  if isinstance(strength, int | float):
    strength = np.float32(strength)
  backend.require_float32("fake_quantize: strength", strength)
  _require_broadcast("fake_quantize", strength, x)
  b = backend.backend(x, strength)
  moved = b.xp.moveaxis(x, axis, -1)
  groups = _split_groups("fake_quantize", moved, group)
  quantized = _quantize_groups(b, groups, levels=2 ** (bits - 1)).reshape(moved.shape)
  quantized = b.xp.moveaxis(quantized, -1, axis)
  strength = b.xp.broadcast_to(strength, x.shape)
  partly = x + b.fence(strength * (quantized - x))
  return b.xp.where(strength == 0, x, b.xp.where(strength == 1, quantized, partly))


def _quantize_groups(b, groups, levels):
  """Rounds each [..., group] to multiples of its delta, -levels to levels - 1 of them."""
  largest = b.xp.abs(groups).max(axis=-1, keepdims=True)
  delta = b.divide(largest, np.float32(levels - 1))
  ratio = b.divide(groups, b.xp.where(delta == 0, np.float32(1), delta))
  q = b.xp.clip(b.rint(ratio), np.float32(-levels), np.float32(levels - 1))
  return b.xp.where(delta == 0, np.float32(0), b.fence(q * delta))


def _require_broadcast(name: str, strength, x) -> None:
  pairs = zip(strength.shape[::-1], x.shape[::-1])
  if strength.ndim > x.ndim or any(s not in (1, n) for s, n in pairs):
    raise ValueError(f"{name}: strength {strength.shape} does not broadcast to x {x.shape}.")


# Formats of checkpoints.


def decode_e8m0(codes):
  """uint8 E8M0 codes → float32 2^(code - 127); 255 is NaN, 0 is 2^-127, a subnormal."""
  _require("decode_e8m0", "codes", codes, np.uint8)
  b = backend.backend(codes)
  field = codes.astype(np.uint32)
  u = b.xp.where(field == 0, np.uint32(0x00400000), field << 23)
  return b.from_bits(b.xp.where(field == 255, _NAN, u))


def decode_fp8(codes):
  """uint8 float8_e4m3fn codes → float32: sign, 4 bits of exponent (bias 7), 3 of fraction.

  No infinities; 0x7f and 0xff are NaN; 0x80 is -0; the largest value is 448, the smallest 2^-9.
  """
  _require("decode_fp8", "codes", codes, np.uint8)
  b = backend.backend(codes)
  u = codes.astype(np.uint32)
  magnitude = u & 0x7F
  normal = (magnitude << 20) + np.uint32((127 - 7) << 23)
  subnormal = b.bits(magnitude.astype(np.float32) * np.float32(2.0**-9))  # exact
  bits = b.xp.where(magnitude < 8, subnormal, normal)
  bits = b.xp.where(magnitude == 0x7F, _NAN, bits)
  return b.from_bits(bits | (u & 0x80) << 24)


def decode_fp4(codes):
  """uint8 float4_e2m1fn codes 0 .. 15 → float32: 0, .5, 1, 1.5, 2, 3, 4, 6, then the negatives.

  Code 8 is +0, as in DeepSeek's table; the format itself and transformers read it as -0. NumPy
  refuses codes above 15 (ValueError), XLA reads their low four bits.
  """
  _require("decode_fp4", "codes", codes, np.uint8)
  b = backend.backend(codes)
  if b is backend.NumpyBackend and (codes > 15).any():
    raise ValueError(f"decode_fp4: expected codes 0 to 15, got {codes.max()} (unpack_fp4 first).")
  table = np.concatenate([_FP4_VALUES, [np.float32(0)], -_FP4_VALUES[1:]])
  return b.xp.asarray(table)[(codes & 15).astype(np.int32)]


def unpack_fp4(packed):
  """uint8 [..., n], two codes a byte, the low nibble first → uint8 codes 0 .. 15 [..., 2n]."""
  _require("unpack_fp4", "packed", packed, np.uint8)
  if packed.ndim == 0:
    raise ValueError("unpack_fp4: expected packed [..., n], got a scalar.")
  xp = backend.backend(packed).xp
  codes = xp.stack([packed & 15, packed >> 4], axis=-1)
  return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def scale_by_e8m0(values, scale_codes):
  """values · 2^(code - 127), rounded once: IEEE multiplication, with subnormals even under XLA.

  Exact, but for overflow, which gives infinity, and for subnormal results that need more bits than
  there are, which are rounded to nearest, ties to even.

  Args:
    values: float32.
    scale_codes: uint8 E8M0 of a shape that broadcasts with values; 255 gives NaN.

  Returns:
    float32; NaN is always 0x7fc00000.

  Raises:
    TypeError: values are not float32, or scale codes not uint8.
  """
  backend.require_float32("scale_by_e8m0", values)
  _require("scale_by_e8m0", "scale_codes", scale_codes, np.uint8)
  b = backend.backend(values, scale_codes)
  scale = _scale_by_e8m0 if b is backend.NumpyBackend else _scale_by_e8m0_xla
  return scale(b, values, scale_codes)


def _scale_by_e8m0(b, values, scale_codes):
  scaled = _times_power_of_two(b, values, scale_codes.astype(np.int32) - 127)
  return b.from_bits(b.xp.where(scale_codes == 255, _NAN, b.bits(scaled)))


_scale_by_e8m0_xla = jax.jit(_scale_by_e8m0, static_argnums=0)


def dequantize_fp8(codes, scales, block: tuple[int, int] = (128, 128)):
  """FP8 weights with one scale per block → float32; exact in BF16 for E8M0 scales of common size.

  Args:
    codes: uint8 float8_e4m3fn [..., N, K].
    scales: uint8 E8M0 or float32 [..., ceil(N / block[0]), ceil(K / block[1])]: the last block of a
      row or column may be short. A product with a float32 scale is rounded to float32; domain: no
      infinite product, none below 2^-126.
    block: rows and columns that share a scale.

  Returns:
    float32 [..., N, K].

  Raises:
    TypeError: codes or scales of another dtype, or missing.
    ValueError: shapes that do not fit.
  """
  _require("dequantize_fp8", "codes", codes, np.uint8)
  _require("dequantize_fp8", "scales", scales, np.uint8, np.float32)
  if codes.ndim < 2:
    raise ValueError(f"dequantize_fp8: expected codes [..., N, K], got shape {codes.shape}.")
  n, k = codes.shape[-2:]
  expected = (*codes.shape[:-2], -(-n // block[0]), -(-k // block[1]))
  if scales.shape != expected:
    raise ValueError(
      f"dequantize_fp8: codes {codes.shape} in blocks of {block} need scales {expected}, "
      f"got {scales.shape}."
    )
  b = backend.backend(codes, scales)
  scales = b.xp.repeat(b.xp.repeat(scales, block[0], axis=-2), block[1], axis=-1)[..., :n, :k]
  if scales.dtype == np.uint8:
    return scale_by_e8m0(decode_fp8(codes), scales)
  return b.fence(decode_fp8(codes) * scales)


def dequantize_fp4(packed, scales, group: int = 32):
  """FP4 weights with one E8M0 scale per group of a row → float32.

  Args:
    packed: uint8 [..., N, K / 2], two codes a byte, the low nibble first.
    scales: uint8 E8M0 [..., N, K / group].
    group: consecutive elements of a row that share a scale.

  Returns:
    float32 [..., N, K].

  Raises:
    TypeError: packed or scales are not uint8, or missing.
    ValueError: shapes that do not fit.
  """
  _require("dequantize_fp4", "packed", packed, np.uint8)
  _require("dequantize_fp4", "scales", scales, np.uint8)
  codes = unpack_fp4(packed)
  if codes.shape[-1] % group:
    raise ValueError(
      f"dequantize_fp4: groups of {group} do not divide the rows of {codes.shape[-1]} in packed "
      f"{packed.shape}."
    )
  expected = (*codes.shape[:-1], codes.shape[-1] // group)
  if scales.shape != expected:
    raise ValueError(
      f"dequantize_fp4: packed {packed.shape} in groups of {group} codes needs scales {expected}, "
      f"got {scales.shape}."
    )
  b = backend.backend(packed, scales)
  return scale_by_e8m0(decode_fp4(codes), b.xp.repeat(scales, group, axis=-1))


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
  largest = (b.bits(groups) & _MAGNITUDE).max(axis=-1, keepdims=True)
  u, t = b.xp.maximum(largest, floor.view(np.uint32)), top.view(np.uint32)
  exponent = (u >> 23).astype(np.int32) - np.int32(t >> 23)
  exponent = exponent + ((u & _FRACTION) > (t & _FRACTION)).astype(np.int32)
  rounded = round_to_format(b, _times_power_of_two(b, groups, -exponent))
  result = _times_power_of_two(b, rounded, exponent)
  return b.from_bits(b.xp.where(largest >= _INFINITY, _NAN, b.bits(result)))


_qdq_groups_xla = jax.jit(_qdq_groups, static_argnums=(0, 2, 3, 4))


def _round_e4m3(b, x):
  """Rounds |x| ≤ 448 to float8_e4m3fn, to nearest, ties to even, in float32."""
  u = b.bits(x)
  # Drops 20 of the 23 fraction bits; a carry runs into the exponent field, as it should.
  normal = b.from_bits((u + 0x7FFFF + ((u >> 20) & 1)) & np.uint32(0xFFF00000))
  subnormal = b.rint(x * np.float32(2.0**9)) * np.float32(2.0**-9)
  return b.xp.where((u & _MAGNITUDE) < np.float32(2.0**-6).view(np.uint32), subnormal, normal)


def _round_e2m1_to_even(b, x):
  # Below 0.25 comes code 0, at 0.75 the even code 2, and so on: every second midpoint rounds up.
  m = b.xp.abs(x)
  up = [m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5]
  return b.from_bits(b.bits(_fp4_value(b, up)) | (b.bits(x) & _SIGN))


def _round_e2m1_to_zero(b, x):
  m = b.xp.abs(x)
  value = _fp4_value(b, [m > t for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)])
  return b.xp.where((x < 0) & (value > 0), -value, value)


def _fp4_value(b, above):
  """The magnitude whose code is the number of midpoints that lie below."""
  return b.xp.asarray(_FP4_VALUES)[sum(one.astype(np.int32) for one in above)]


# Shared pieces.


def _split_groups(name, x, group):
  """[..., n] → [..., n / group, group]; None is one group."""
  if x.ndim == 0:
    raise ValueError(f"{name}: expected x [..., n], got a scalar.")
  width = x.shape[-1]
  size = width if group is None else group
  if size < 1 or width % size:
    raise ValueError(f"{name}: groups of {size} do not divide an axis of {width}.")
  return x.reshape(*x.shape[:-1], width // size, size)


def _times_power_of_two(b, x, exponent):
  """x · 2^exponent, x float32 and exponent int32: IEEE multiplication, on integer bits."""
  u = b.bits(x)
  magnitude = u & _MAGNITUDE
  field = (magnitude >> 23).astype(np.int32)
  fraction = magnitude & _FRACTION
  # Normalised: |x| = significand · 2^(field - 150), with 24 bits in every significand but zero's.
  length = (b.bits(fraction.astype(np.float32)) >> 23).astype(np.int32) - 126
  lift = b.xp.where(field == 0, b.xp.clip(24 - length, 0, 24), 0)
  significand = b.xp.where(field == 0, fraction, fraction | 0x800000) << lift.astype(np.uint32)
  field = b.xp.maximum(field, 1) - lift + exponent
  # Places below the subnormals' last; 25 drop any significand whole.
  drop = b.xp.clip(1 - field, 0, 25).astype(np.uint32)
  kept = significand >> drop
  dropped = significand - (kept << drop)
  half = (np.uint32(1) << drop) >> 1
  round_up = (drop > 0) & ((dropped > half) | ((dropped == half) & (kept & 1 == 1)))
  # The significand's leading bit adds one to the exponent field, and so does a carry out of it.
  below = b.xp.clip(field - 1, 0, 254).astype(np.uint32)
  scaled = b.xp.minimum((below << 23) + kept + round_up.astype(np.uint32), _INFINITY)
  scaled = b.xp.where(significand == 0, np.uint32(0), scaled)
  scaled = b.xp.where(magnitude == _INFINITY, _INFINITY, scaled) | (u & _SIGN)
  return b.from_bits(b.xp.where(magnitude > _INFINITY, _NAN, scaled))


def _require(name: str, label: str, x, *dtypes) -> None:
  wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
  if x is None:
    raise TypeError(f"{name}: {label} are missing, expected {wanted}.")
  found = getattr(x, "dtype", type(x).__name__)
  if not any(found == dtype for dtype in dtypes):
    raise TypeError(f"{name}: {label} must be {wanted}, got {found}.")
