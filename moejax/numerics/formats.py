"""Number formats of quantised checkpoints: FP8, FP4 and E8M0, decoded exactly.

E8M0 is a power of two, 2^(code - 127), stored as its exponent field. Multiplying by one works on
integer bits: factor, operand or product may be subnormal, and XLA flushes those to zero.
"""

import jax
import numpy as np

from moejax.numerics import backend, layout

# Magnitudes of the eight float4_e2m1fn codes without a sign.
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def decode_e8m0(codes):
  """uint8 E8M0 codes → float32 2^(code - 127); 255 is NaN, 0 is 2^-127, a subnormal."""
  _require("decode_e8m0", "codes", codes, np.uint8)
  b = backend.backend(codes)
  field = codes.astype(np.uint32)
  u = b.xp.where(field == 0, np.uint32(0x00400000), field << 23)
  return b.from_bits(b.xp.where(field == 255, layout.NAN, u))


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
  bits = b.xp.where(magnitude == 0x7F, layout.NAN, bits)
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
  table = np.concatenate([FP4_VALUES, [np.float32(0)], -FP4_VALUES[1:]])
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
  scaled = times_power_of_two(b, values, scale_codes.astype(np.int32) - 127)
  return b.from_bits(b.xp.where(scale_codes == 255, layout.NAN, b.bits(scaled)))


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


def times_power_of_two(b, x, exponent):
  """x · 2^exponent, x float32 and exponent int32: IEEE multiplication, on integer bits."""
  u = b.bits(x)
  magnitude = u & layout.MAGNITUDE
  field = (magnitude >> 23).astype(np.int32)
  fraction = magnitude & layout.FRACTION
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
  scaled = b.xp.minimum((below << 23) + kept + round_up.astype(np.uint32), layout.INFINITY)
  scaled = b.xp.where(significand == 0, np.uint32(0), scaled)
  scaled = b.xp.where(magnitude == layout.INFINITY, layout.INFINITY, scaled) | (u & layout.SIGN)
  return b.from_bits(b.xp.where(magnitude > layout.INFINITY, layout.NAN, scaled))


def _require(name: str, label: str, x, *dtypes) -> None:
  wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
  if x is None:
    raise TypeError(f"{name}: {label} are missing, expected {wanted}.")
  found = getattr(x, "dtype", type(x).__name__)
  if not any(found == dtype for dtype in dtypes):
    raise TypeError(f"{name}: {label} must be {wanted}, got {found}.")
