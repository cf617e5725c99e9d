"""Tensors of quantised checkpoints: which tensor is the scale of which, and their values.

FP8 (F8_E4M3) has one scale, E8M0 or float32, per block of 128 × 128; FP4, two codes to a byte (I8
or U8), one E8M0 scale per 32 elements of a row (DeepSeek-V3 and V4).
"""

import numpy as np

from moejax import numerics
from moejax.checkpoints import files

QUANTIZED = ("F8_E4M3", "I8", "U8")
_BLOCK = 128
_GROUP = 32


def stored_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
  """The shape that a tensor of `shape` has in a file of this dtype."""
  if dtype in ("I8", "U8"):
    return (*shape[:-1], shape[-1] // 2)
  return shape


def scale_of(
  entry: files.Entry, shape: tuple[int, ...], checkpoint: dict[str, files.Entry]
) -> files.Entry | None:
  """The scale of a tensor [..., out, in], None for one that is not quantised.

  Raises:
    ValueError: it is missing, or of another dtype or shape than expected.
  """
  if entry.dtype not in QUANTIZED:
    return None
  names = (entry.name.removesuffix(".weight") + ".scale", entry.name + "_scale_inv")
  name = next((name for name in names if name in checkpoint), None)
  if name is None:
    raise ValueError(
      f"tensor {entry.name}: {entry.dtype} needs a scale, but there is no tensor "
      f"{' or '.join(names)}."
    )
  scale = checkpoint[name]
  dtypes = ("F8_E8M0", "F32") if entry.dtype == "F8_E4M3" else ("F8_E8M0",)
  expected = _scale_shape(entry, shape)
  if scale.dtype not in dtypes or scale.shape != expected:
    raise ValueError(
      f"tensor {name}: found {scale.dtype} of shape {scale.shape}, expected "
      f"{' or '.join(dtypes)} of shape {expected}."
    )
  return scale


def dequantize(kind: str, codes: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Codes [..., out, in or in / 2] of a file's dtype `kind` → their values [..., out, in].

  Products are float32 and then cast: exact in BF16 but for subnormal corners with E8M0 scales,
  rounded to nearest, ties to even, otherwise.
  """
  fp8 = kind == "F8_E4M3"
  codes = codes.view(np.uint8)
  out, inner = codes.shape[-2], codes.shape[-1] * (1 if fp8 else 2)
  values = np.empty((*codes.shape[:-1], inner), dtype)
  for start in range(0, out, _BLOCK):  # bands, since decoding takes many times the tensor's space
    rows = slice(start, start + _BLOCK)
    if fp8:
      block = slice(start // _BLOCK, start // _BLOCK + 1)
      band = numerics.dequantize_fp8(codes[..., rows, :], scale[..., block, :])
    else:
      band = numerics.dequantize_fp4(codes[..., rows, :], scale[..., rows, :])
    values[..., rows, :] = band.astype(dtype)
  return values


def _scale_shape(entry: files.Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
  if len(shape) < 2 or (entry.dtype != "F8_E4M3" and shape[-1] % _GROUP):
    raise ValueError(f"tensor {entry.name}: {entry.dtype} is not expected of shape {shape}.")
  *lead, out, inner = shape
  if entry.dtype == "F8_E4M3":
    return (*lead, -(-out // _BLOCK), -(-inner // _BLOCK))
  return (*lead, out, inner // _GROUP)
