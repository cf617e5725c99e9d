"""Rotary position embedding (Su et al., 2021): tables made on the host, rotations with fixed bits.

The bits of a cosine depend on library and compiler.  Tables are therefore computed once, by NumPy
in FP64, and enter a program as arguments; a rotation is two products and an addition per element,
with the same bits under NumPy and XLA.
"""

import numpy as np

from moejax.numerics import backend

# Positions up to here are exact in float32.
_MAX_POSITION = 1 << 24


def inverse_frequencies(dim: int, theta: float) -> np.ndarray:
  """theta^(-2i / dim) for i in range(dim / 2), in radians per position.

  Computed in FP64 and rounded once; implementations that take the power in float32 may differ in
  the last bit.

  Args:
    dim: rotated width, even.
    theta: base of the geometric sequence.

  Returns:
    float32 NumPy [dim / 2].
  """
  if dim <= 0 or dim % 2:
    raise ValueError(f"dim: expected a positive even number, got {dim}.")
  return (float(theta) ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)


def rope_tables(positions, inverse_frequencies) -> tuple[np.ndarray, np.ndarray]:
  """Cosines and sines of position · inverse frequency.

  The angle is a float32 product, as in the published implementations: its error, up to 2^-4 radians
  at position 10^6, is part of the function that was trained.  Its cosine and sine are taken in FP64
  and rounded once.  They rest on the host's FP64 library, which is right to about an ulp of FP64:
  two hosts may differ in about one entry of 10^8.

  Args:
    positions: integers [T], from 0 to 2^24.
    inverse_frequencies: float32 [dim / 2].

  Returns:
    (cos, sin): float32 NumPy [T, dim / 2] each.
  """
  positions = np.asarray(positions)
  if positions.ndim != 1 or not np.issubdtype(positions.dtype, np.integer):
    raise ValueError(
      f"positions: expected integers [T], got {positions.dtype} of shape {positions.shape}."
    )
  if positions.size and not 0 <= positions.min() <= positions.max() <= _MAX_POSITION:
    raise ValueError(f"positions: expected 0 to 2^24, got {positions.min()} to {positions.max()}.")
  backend.require_float32("inverse_frequencies", inverse_frequencies)
  angles = positions.astype(np.float32)[:, None] * np.asarray(inverse_frequencies)[None, :]
  angles = angles.astype(np.float64)
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(b, first, second, cos, sin):
  """The pairs (first, second), each turned by its angle."""
  cos, sin = (b.xp.broadcast_to(table, first.shape) for table in (cos, sin))
  return (
    b.fence(first * cos) - b.fence(second * sin),
    b.fence(second * cos) + b.fence(first * sin),
  )


def _require_pairs(x, cos, sin):
  for name, value in (("x", x), ("cos", cos), ("sin", sin)):
    backend.require_float32(name, value)
  if x.shape[-1] != 2 * cos.shape[-1] or cos.shape != sin.shape:
    raise ValueError(
      f"x, cos, sin: expected [..., T, D] and twice [T, D / 2], got {x.shape}, {cos.shape} and"
      f" {sin.shape}."
    )


def rotate_half(x, cos, sin):
  """Rotates the pairs (i, i + D / 2) of the last axis: Llama, OLMoE, Qwen, DeepSeek-MoE.

  Args:
    x: float32 [..., T, D], finite.
    cos: float32 [T, D / 2], or with leading axes that broadcast to those of x.
    sin: as cos.

  Returns:
    float32 [..., T, D].
  """
  _require_pairs(x, cos, sin)
  b = backend.backend(x, cos, sin)
  half = cos.shape[-1]
  return b.xp.concatenate(_rotate(b, x[..., :half], x[..., half:], cos, sin), axis=-1)


def rotate_interleaved(x, cos, sin, *, inverse=False):
  """Rotates the pairs (2i, 2i + 1) of the last axis: DeepSeek-V2 to V4.

  Args:
    x: float32 [..., T, D], finite.
    cos: float32 [T, D / 2], or with leading axes that broadcast to those of x.
    sin: as cos.
    inverse: turns by the negative angle, as DeepSeek-V4 does to the output of attention.

  Returns:
    float32 [..., T, D].
  """
  _require_pairs(x, cos, sin)
  b = backend.backend(x, cos, sin)
  pairs = _rotate(b, x[..., 0::2], x[..., 1::2], cos, -sin if inverse else sin)
  return b.xp.stack(pairs, axis=-1).reshape(x.shape)
