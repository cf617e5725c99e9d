"""A real low-bit quantiser for a cache: packed codes, one scale and one zero point per group.

A group is `group` consecutive elements of the last axis, so that it never crosses tokens, heads or
sequences. Its values are kept as (code - zero) · scale, with 2, 3 or 4 bits a code.

Codes are packed densely, the first in the lowest bits: as little-endian bytes of the integer
Σ code_i · 2^(bits · i). So a byte holds two codes of 4 bits or four of 2 bits, and three bytes hold
eight codes of 3 bits. What is left of the last byte is zero.

The same bits come from NumPy, eager XLA, `jit` and `vmap`, for every shape around a group.
"""

import math

from flax import struct
import jax
from jax import lax
import ml_dtypes
import numpy as np

from moejax.numerics import backend, bf16, rows

_ZERO = np.float32(0)
_ONE = np.float32(1)
_INF = np.float32(np.inf)
_STEPS = 20  # half-quadratic steps, and
_BETA = np.float32(10)  # their penalty, as in HQQ


@struct.dataclass
class Packed:
  """Quantised values [..., n], n = m · group.

  Attributes:
    codes: uint8 [..., ceil(n · bits / 8)], see the module.
    scale: [..., m], bfloat16 from `quantize_packed`, as given from `quantize_with`.
    zero: [..., m], the code of the value 0, not an integer in general; of the dtype of its origin.
    bits: per code, 2 to 4.
    group: consecutive values that share a scale and a zero point.
  """

  codes: jax.Array
  scale: jax.Array
  zero: jax.Array
  bits: int = struct.field(pytree_node=False)
  group: int = struct.field(pytree_node=False)

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the values."""
    return (*self.scale.shape[:-1], self.scale.shape[-1] * self.group)


# Codes and bytes.


def pack_codes(codes, bits: int):
  """uint8 codes [..., n], below 2^bits → bytes, uint8 [..., ceil(n · bits / 8)], see the module.

  NumPy refuses larger codes (ValueError), XLA reads their low bits.
  """
  _require_bits("pack_codes", bits)
  _require_bytes("pack_codes: codes", codes)
  b = backend.backend(codes)
  if b is backend.NumpyBackend and (codes >= 2**bits).any():
    raise ValueError(f"pack_codes: expected codes below {2**bits}, got {codes.max()}.")
  per_word, word_bytes = _word(bits)
  n = codes.shape[-1]
  words = _split(b.xp, codes & (2**bits - 1), per_word)
  stream = _fields(b.xp, _join(words, bits), 8, word_bytes)
  return stream[..., : _num_bytes(n, bits)]


def unpack_codes(packed, bits: int, n: int):
  """Bytes of `pack_codes`, uint8 [..., ceil(n · bits / 8)] → uint8 codes [..., n]."""
  _require_bits("unpack_codes", bits)
  _require_bytes("unpack_codes: packed", packed)
  expected = _num_bytes(n, bits)
  if packed.shape[-1] != expected:
    raise ValueError(
      f"unpack_codes: {n} codes of {bits} bits take {expected} bytes, got {packed.shape[-1]}."
    )
  xp = backend.backend(packed).xp
  per_word, word_bytes = _word(bits)
  words = _split(xp, packed, word_bytes)
  return _fields(xp, _join(words, 8), bits, per_word)[..., :n]


def _num_bytes(n, bits):
  return -(-n * bits // 8)


def _word(bits):
  """(codes, bytes) of the shortest run of codes that ends with a byte."""
  length = math.lcm(bits, 8)
  return length // bits, length // 8


def _split(xp, x, size):
  """uint8 [..., n] → uint32 [..., ceil(n / size), size], zeros at the end."""
  count = -(-x.shape[-1] // size)
  pad = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
  return xp.pad(x, pad).reshape(*x.shape[:-1], count, size).astype(np.uint32)


def _join(fields, width):
  """uint32 [..., size] of `width` bits each → the words [...] that hold them, the first lowest."""
  return sum(fields[..., i] << np.uint32(width * i) for i in range(fields.shape[-1]))


def _fields(xp, words, width, size):
  """Inverse of `_join`, all words in a row: uint32 [..., count] → uint8 [..., count · size]."""
  fields = [(words >> np.uint32(width * i)) & np.uint32(2**width - 1) for i in range(size)]
  in_a_row = (*words.shape[:-1], words.shape[-1] * size)
  return xp.stack(fields, axis=-1).reshape(in_a_row).astype(np.uint8)


# Values and codes.


def quantize_packed(x, bits: int, group: int) -> Packed:
  """Quantises each group to 2^bits levels between its extremes, the zero point then improved.

    scale = R((max - min) / (2^bits - 1)),  zero = -min / scale,  R: to BF16, ties to even
    20 times:  code = clip(rint(x / scale + zero), 0, 2^bits - 1),  r = x - (code - zero) · scale
               e = sign(r) · max(|r| - |r|^(p-1) / 10, 0),  zero = mean(code - (x - e) / scale)

  The half-quadratic scheme of HQQ (Badri and Shaji, 2023; the library mobiusml/hqq): it lowers
  Σ |r|^p and moves the zero point only. As there, r is in units of x, whatever the scale, so that e
  is 0 for errors below 0.21. Two choices are ours:

  * p = 1/2, not 0.7. Then |r|^(p-1) is 1 / √|r|, which takes correctly rounded operations only, and
    no power function, whose bits depend on the machine.
  * Each group keeps the first best of its 21 zero points: the one with the smallest Σ |x - y|, y
    being what `dequantize_packed` gives for R(zero). What is judged is what is stored. The library
    stops all groups at once, when the mean error of a whole tensor no longer falls.

  Domain: |x| < 2^120; no nonzero |x| below 2^-60, or below 2^-90 of the largest in its group.

  Args:
    x: float32 [..., n].
    bits: 2 to 4.
    group: consecutive elements of the last axis that share a scale; must divide it.

  Returns:
    Packed, with scale and zero in bfloat16. A group of one value c has scale R(|c|) and zero -1, 0
    or 1, and comes back as R(c); a group of zeros as +0.

  Raises:
    TypeError: x is not float32.
    ValueError: x is a scalar, bits outside 2 to 4, or a group that does not divide the last axis.
  """
  groups = _split_groups("quantize_packed", x, bits, group)
  b = backend.backend(x)
  fit = _fit if b is backend.NumpyBackend else _fit_xla
  scale, zero = (v.astype(ml_dtypes.bfloat16) for v in fit(b, groups, 2**bits - 1))
  return quantize_with(x, scale, zero, bits, group)


def quantize_with(x, scale, zero, bits: int, group: int) -> Packed:
  """Quantises with given scales and zero points.

    code = clip(rint(x / scale + fraction) + whole, 0, 2^bits - 1),  whole = rint(zero),
    fraction = zero - whole

  An integer zero point thus adds no rounding. With scale = max|x| / (2^(bits-1) - 1) in float32 and
  zero = 2^(bits-1), what is read back is `fake_quantize(x, bits, group=group)` rounded to BF16, but
  for its -0, which no code can hold.

  Domain: quotients x / scale of 0 or at least 2^-126.

  Args:
    x: float32 [..., n].
    scale: bfloat16 or float32 [..., n / group], not negative; 0 counts as 1, for groups of zeros.
    zero: bfloat16 or float32 of scale's shape.
    bits: 2 to 4.
    group: consecutive elements of the last axis that share a scale; must divide it.

  Returns:
    Packed, with scale and zero as given.

  Raises:
    TypeError: x is not float32, or scale or zero neither float32 nor bfloat16.
    ValueError: x is a scalar, bits outside 2 to 4, a group that does not divide the last axis, or a
      scale or zero of another shape.
  """
  groups = _split_groups("quantize_with", x, bits, group)
  for label, given in (("scale", scale), ("zero", zero)):
    dtype = getattr(given, "dtype", type(given).__name__)
    if dtype not in (np.float32, ml_dtypes.bfloat16):
      raise TypeError(f"quantize_with: {label} must be float32 or bfloat16, got {dtype}.")
    if given.shape != groups.shape[:-1]:
      raise ValueError(
        f"quantize_with: x {x.shape} in groups of {group} needs {label} {groups.shape[:-1]}, "
        f"got {given.shape}."
      )
  b = backend.backend(x, scale, zero)
  wide = (v.astype(np.float32)[..., None] for v in (scale, zero))  # exact
  codes = _encode(b, groups, *wide, 2**bits - 1).astype(np.uint8).reshape(x.shape)
  return Packed(pack_codes(codes, bits), scale, zero, bits, group)


def dequantize_packed(packed: Packed):
  """What the codes stand for: R(R(code - zero) · scale), float32 of BF16 values [..., n].

  R rounds to BF16, ties to even. The subtraction and the product are float32.
  """
  shape = packed.shape
  codes = unpack_codes(packed.codes, packed.bits, shape[-1]).astype(np.float32)
  groups = codes.reshape(*packed.scale.shape, packed.group)
  scale, zero = (v.astype(np.float32)[..., None] for v in (packed.scale, packed.zero))  # exact
  return _decode(groups, scale, zero).reshape(shape)


def packed_nbytes(packed: Packed) -> int:
  """Bytes that the arrays hold: bits / 8 per value, and 4 per group with BF16 scales."""
  return sum(array.nbytes for array in jax.tree.leaves(packed))


# Groups with scale and zero, float32 that broadcast; top is the largest code.


def _fit(b, groups, top):
  """[..., m, group] → (scale, zero) [..., m] of each group, of BF16 values."""
  xp, shape = b.xp, groups.shape[:-1]
  # The group comes first: one step is then long rows, which XLA computes five times as fast.
  groups = groups.reshape(-1, groups.shape[-1]).T
  low, high = groups.min(axis=0, keepdims=True), groups.max(axis=0, keepdims=True)
  span = high - low
  is_constant = span == 0
  scale = xp.where(is_constant, xp.abs(high), b.divide(span, np.float32(top)))
  scale = bf16.round_bf16(scale)
  zero = xp.where(is_constant, -xp.sign(high), _over(b, -low, scale))
  zero = xp.where(zero == 0, _ZERO, zero)  # never -0

  def step(state):
    zero, best_zero, best_error = state
    stored = bf16.round_bf16(zero)
    read = _decode(_encode(b, groups, scale, stored, top), scale, stored)
    error = rows.tree_sum(xp.abs(groups - read), axis=0, keepdims=True)
    better = error < best_error
    best_zero, best_error = xp.where(better, stored, best_zero), xp.where(better, error, best_error)
    return _improve(b, groups, scale, zero, top), best_zero, best_error

  # One step more than there are zero points to find, to judge the last one.
  start = zero, zero, xp.full_like(zero, _INF)
  _, zero, _ = _repeat(b, _STEPS + 1, step, start)
  return scale.reshape(shape), zero.reshape(shape)


_fit_xla = jax.jit(_fit, static_argnums=(0, 2))


def _repeat(b, count, step, state):
  if b is backend.XlaBackend:
    return lax.fori_loop(0, count, lambda _, state: step(state), state)
  for _ in range(count):
    state = step(state)
  return state


def _improve(b, groups, scale, zero, top):
  """The next zero point of groups [group, n], in float32 [1, n]: one half-quadratic step."""
  codes = _encode(b, groups, scale, zero, top)
  residual = groups - b.fence((codes - zero) * scale)
  shifts = codes - _over(b, groups - _shrink(b, residual), scale)
  return b.divide(rows.tree_sum(shifts, axis=0, keepdims=True), np.float32(groups.shape[0]))


def _shrink(b, r):
  """sign(r) · max(|r| - |r|^(p-1) / beta, 0) with p = 1/2."""
  size = b.xp.abs(r)
  root = b.xp.sqrt(b.xp.where(size == 0, _ONE, size))
  shrunk = b.xp.maximum(size - _ONE / b.hold(_BETA * root), _ZERO)
  return b.xp.where(r < 0, -shrunk, shrunk)


def _encode(b, groups, scale, zero, top):
  whole = b.rint(zero)
  code = b.rint(_over(b, groups, scale) + (zero - whole)) + whole
  return b.xp.clip(code, _ZERO, np.float32(top))


def _decode(codes, scale, zero):
  return bf16.round_bf16(bf16.round_bf16(codes - zero) * scale)


def _over(b, x, scale):
  """x / scale, or x where the scale is 0."""
  return b.divide(x, b.xp.where(scale == 0, _ONE, scale))


# Arguments.


def _split_groups(name, x, bits, group):
  """float32 [..., n] → [..., n / group, group]."""
  backend.require_float32(name, x)
  _require_bits(name, bits)
  if x.ndim == 0:
    raise ValueError(f"{name}: expected x [..., n], got a scalar.")
  if group < 1 or x.shape[-1] % group:
    raise ValueError(f"{name}: groups of {group} do not divide an axis of {x.shape[-1]}.")
  return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _require_bits(name, bits):
  if bits not in (2, 3, 4):
    raise ValueError(f"{name}: bits must be 2, 3 or 4, got {bits}.")


def _require_bytes(label, x):
  dtype = getattr(x, "dtype", type(x).__name__)
  if dtype != np.uint8:
    raise TypeError(f"{label} must be uint8, got {dtype}.")
  if x.ndim == 0:
    raise ValueError(f"{label} must be [..., n], got a scalar.")
