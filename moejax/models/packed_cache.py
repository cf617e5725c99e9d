"""Caches that hold codes of few bits (`numerics.Packed`) where the mode says so."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from moejax import numerics
from moejax.models.execution import Mode
from moejax.models.indexing import quotient, remainder
from moejax.models.rings import overwrite
from moejax.models.run import Run
from moejax.models.state import Part, write_rows
from moejax.numerics import Packed


def empty(mode: Mode, shape: tuple[int, ...]) -> Packed | jax.Array:
  """What keeps values of a shape [..., C] before any is written."""
  if mode.packed_kv is None:
    return jnp.zeros(shape, mode.dtype)
  zeros = jax.eval_shape(lambda: store(mode, jnp.zeros(shape, jnp.float32)))
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)


def store(mode: Mode, x) -> Packed | jax.Array:
  """float32 [..., C] as the cache keeps it."""
  kept = mode.packed_kv
  if kept is None:
    return x.astype(mode.dtype)
  width = x.shape[-1]
  group = min(kept.group, width)
  if width % group:
    raise ValueError(f"mode: groups of {group} do not divide heads of {width} channels.")
  return numerics.quantize_packed(x, kept.bits, group)


def load(mode: Mode, kept: Packed | jax.Array) -> jax.Array:
  """What is read of it, in the dtype of a plain cache."""
  if not isinstance(kept, Packed):
    return kept
  return numerics.dequantize_packed(kept).astype(mode.dtype)


def stored_parts(name: str, kept: Packed | jax.Array, rows=None) -> list[Part]:
  """The tensors of it; of packed values codes, scales and zero points."""
  if not isinstance(kept, Packed):
    return [Part(name, kept, rows)]
  fields = ("codes", "scale", "zero")
  return [Part(f"{name}.{field}", getattr(kept, field), rows) for field in fields]


@struct.dataclass
class PackedKvCache:
  """Keys and values as codes, and the newest ones as they were.

  Attributes:
    keys, values: Packed [B, Hkv, N, C], one entry per position, written as the token comes.
    recent: [B, W, 2 · Hkv · C], a ring by position of keys and values in BF16; None without a
      window. W holds the prefill and what is not flushed.
  """

  keys: Packed
  values: Packed
  recent: Any

  @classmethod
  def empty(cls, shape: tuple[int, int, int, int], mode: Mode) -> "PackedKvCache":
    """For [B, Hkv, N, C]."""
    kept, recent = mode.packed_kv, None
    if kept.window:
      ring = (shape[0], max(kept.window, kept.prefill), 2 * shape[1] * shape[3])
      recent = jnp.zeros(ring, mode.dtype)
    return cls(empty(mode, shape), empty(mode, shape), recent)

  def update(self, run: Run, k, v):
    """As `KvCache.update`: one reading without a window, else one for every flush there may be."""
    # Together, for a fit of zero points is long to compile.
    new = store(run.mode, jnp.stack([k, v]))
    put = lambda which: lambda held, part: write_rows(run, held, part[which])
    keys, values = (
      jax.tree.map(put(which), held, new) for which, held in enumerate((self.keys, self.values))
    )
    packed = load(run.mode, keys), load(run.mode, values)
    if self.recent is None:
      return PackedKvCache(keys, values, None), [(*packed, run.valid)]
    recent = overwrite(run, self.recent, _flat(k, v).astype(self.recent.dtype))
    exact, readings = self._exact(run, k, v, packed), []
    window, prefill = run.mode.packed_kv.window, run.mode.packed_kv.prefill
    index = jnp.arange(packed[0].shape[2], dtype=jnp.int32)[None, None, :, None]
    flushed = jnp.where(run.positions < prefill, -1, quotient(run.positions - prefill, window))
    for flush in range(-1, -(-(run.length - prefill) // window)):
      stop = prefill + flush * window if flush >= 0 else 0
      mixed = (jnp.where(index < stop, *pair) for pair in zip(packed, exact))
      readings.append((*mixed, flushed == flush))
    return PackedKvCache(keys, values, recent), readings

  def _exact(self, run: Run, k, v, like):
    """Keys and values [B, Hkv, N, C] with what is known exactly in place: the ring, this call."""
    size = self.recent.shape[1]
    slot = jnp.arange(size, dtype=jnp.int32)[None]
    last = run.start[:, None] - 1
    position = last - remainder(last - slot + size, size)
    length, heads = like[0].shape[2], k.shape[2]
    ring = self.recent.reshape(*self.recent.shape[:2], 2, heads, -1)
    at = jnp.where(position >= 0, position, length)
    new = jnp.stack([k, v], axis=2).astype(ring.dtype)
    out = []
    for which, zeros in enumerate(map(jnp.zeros_like, like)):
      held = write_rows(run, zeros, ring[:, :, which], at)
      out.append(write_rows(run, held, new[:, :, which]))
    return tuple(out)

  def parts(self, position) -> list[Part]:
    out = stored_parts("keys", self.keys, position) + stored_parts("values", self.values, position)
    return out if self.recent is None else [*out, Part("recent", self.recent)]


def _flat(k, v):
  """[B, T, Hkv, C] each → [B, T, 2 · Hkv · C]."""
  return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in (k, v)], axis=-1)
