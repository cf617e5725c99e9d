"""Everything that survives a token, as one explicit pytree.

A layer's state is a `KvCache`, a `PackedKvCache` (`packed_cache`), or a `SparseCache`
(`sparse_state`) for DeepSeek-V4. Arrays have a fixed size, the position says how much of them is in
use; `export` cuts the rest off. What is in use is the content after token-by-token processing,
whatever chunks the tokens came in.
"""

import dataclasses
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.run import Run
from moejax.numerics import fingerprint


@dataclasses.dataclass(frozen=True)
class Part:
  """One tensor of a layer's state.

  Attributes:
    name: of the field, dotted.
    array: [B, ..., rows, width].
    rows: how many rows are in use: int32 [B], or None for all.
  """

  name: str
  array: jax.Array
  rows: jax.Array | None = None


def write_rows(run: Run, held, new, at=None):
  """held [B, H, N, F] with new [B, T, H, F] in it.

  Args:
    at: int32 [B, T], where; by default where the tokens of the call belong, padding nowhere. What
      would be at N or beyond is dropped.
  """
  if at is None:
    at = jnp.where(run.valid, run.positions, held.shape[2])
  rows = jnp.arange(at.shape[0], dtype=jnp.int32)[:, None]
  return held.at[rows, :, at].set(new.astype(held.dtype), mode="drop")


@struct.dataclass
class KvCache:
  """Keys and values as transformers stores them: after norm and rotation, before head repetition.

  Attributes:
    keys, values: [B, Hkv, N, C], one entry per position.
  """

  keys: jax.Array
  values: jax.Array

  def update(self, run: Run, k, v):
    """With the entries k, v [B, T, Hkv, C] of a call; padding is not written.

    Returns:
      (cache, what the queries of the call read): triples of keys and values [B, Hkv, N, C] and a
      mask bool [B, T]. Of several the last whose mask is true for a query is what it reads.
    """
    cache = KvCache(write_rows(run, self.keys, k), write_rows(run, self.values, v))
    return cache, [(cache.keys, cache.values, run.valid)]

  def parts(self, position) -> list[Part]:
    return [Part("keys", self.keys, position), Part("values", self.values, position)]


@struct.dataclass
class PersistentState:
  """The persistent state of a batch.

  Attributes:
    position: int32 [B], tokens processed so far.
    layers: one cache per layer.
    length: positions that the arrays were made for.
  """

  position: jax.Array
  layers: tuple[Any, ...]
  length: int = struct.field(pytree_node=False)

  def rows(self, index) -> "PersistentState":
    """The state of some rows of the batch: a slice or integers [n]."""
    return jax.tree.map(lambda x: x[index], self)

  def parts(self) -> list[list[Part]]:
    """The tensors of each layer in canonical order."""
    return [layer.parts(self.position) for layer in self.layers]

  def fingerprints(self) -> jax.Array:
    """uint32 [L, B, 4] of what is in use in each layer; jittable."""
    return jnp.stack([_layer_fingerprint(parts) for parts in self.parts()])


def _layer_fingerprint(parts: list[Part]):
  prints = []
  for part in parts:
    x = part.array.astype(jnp.float32)
    if part.rows is not None:
      used = _used_rows(part)
      x = jnp.where(used[..., None], x, np.float32(0))
    by_row = jax.lax.bitcast_convert_type(fingerprint(x), jnp.float32)
    prints.append(fingerprint(by_row.reshape(x.shape[0], -1)))
    if part.rows is not None:
      prints.append(jnp.broadcast_to(part.rows.astype(jnp.uint32)[:, None], prints[-1].shape))
  whole = jax.lax.bitcast_convert_type(jnp.concatenate(prints, axis=-1), jnp.float32)
  return fingerprint(whole)


def _used_rows(part: Part):
  """bool [B, ..., rows]."""
  shape = part.array.shape[:-1]
  limit = part.rows.reshape(-1, *[1] * (len(shape) - 1))
  return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < limit


def export(state: PersistentState, row: int = 0) -> dict[str, np.ndarray]:
  """One row's state without padding: "layers.0.keys" → float32, in canonical order.

  Layers ascend; within a layer the order is that of `parts`. Together with the position this is
  the whole state: `restore` gives it back.
  """
  out = {}
  for layer, parts in enumerate(state.parts()):
    for part in parts:
      x = np.asarray(part.array[row].astype(jnp.float32))
      if part.rows is not None:
        x = x[..., : int(part.rows[row]), :]
      out[f"layers.{layer}.{part.name}"] = x
  return out


def flatten(state: PersistentState, row: int = 0) -> np.ndarray:
  """float32 [n], every value of `export` in order; n is `persistent_state_size`."""
  return np.concatenate([x.reshape(-1) for x in export(state, row).values()])


def state_size(state: PersistentState, position: int) -> int:
  """Number of float values in use in one row after `position` tokens; shapes are enough."""
  total = 0
  for layer in state.layers:
    for part in layer.parts(position):
      *lead, rows, width = part.array.shape[1:]
      total += math.prod(lead) * (rows if part.rows is None else part.rows) * width
  return total


def restore(exported: dict[str, np.ndarray], template: PersistentState, position: int):
  """The batch of one whose export this is.

  Args:
    exported: of `export`.
    template: a fresh state of the same config, one row, long enough.
    position: tokens processed.

  Raises:
    ValueError: a tensor is missing, left over or of another shape: a state from another config.
  """
  if position > template.length:
    raise ValueError(f"restore: position {position} is beyond the {template.length} of the state.")
  state = template.replace(position=jnp.full_like(template.position, position))
  left, layers = dict(exported), []
  for index, (layer, parts) in enumerate(zip(state.layers, state.parts())):
    for part in parts:
      name = f"layers.{index}.{part.name}"
      if name not in left:
        raise ValueError(f"restore: {name} is missing; the state is of another config.")
      layer = _put(layer, part, name, left.pop(name))
    layers.append(layer)
  if left:
    raise ValueError(f"restore: {next(iter(left))} is unknown; the state is of another config.")
  return state.replace(layers=tuple(layers))


def _put(layer, part: Part, name: str, values: np.ndarray):
  """The layer with one exported tensor in its place."""
  rows = part.array.shape[-2] if part.rows is None else int(part.rows[0])
  want = (*part.array.shape[1:-2], rows, part.array.shape[-1])
  if values.shape != want:
    raise ValueError(f"restore: {name} is {values.shape}, expected {want}.")
  new = part.array.at[0, ..., :rows, :].set(jnp.asarray(values).astype(part.array.dtype))
  return _replace(layer, part.name.split("."), new)


def _replace(record, path: list[str], value):
  if len(path) > 1:
    value = _replace(getattr(record, path[0]), path[1:], value)
  return record.replace(**{path[0]: value})
