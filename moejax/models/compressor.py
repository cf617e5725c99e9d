"""DeepSeek-V4's compressors: a window of m tokens becomes one key-value entry.

HCA pools the m tokens of a window; CSA also the m before it, each token having one set of channels
for its own window ("b") and one for the next ("a").
"""

import dataclasses

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax import numerics
from moejax.models.config import Config
from moejax.models.indexing import quotient, remainder, take_rows
from moejax.models.layers import projection_init, weight_rows
from moejax.models.packed_cache import store
from moejax.models.run import Run
from moejax.models.sparse_state import CompressorState


def rms_norm_once(run: Run, x, weight, eps: float):
  """R(w · x / rms): DeepSeek-V4 rounds once."""
  return run.ops.round(run.ops.normalize(x, eps) * weight_rows(weight, x))


def rotate_tail(run: Run, x, rope, *, inverse: bool = False):
  """Rotates the last channels of x, in pairs (2i, 2i + 1), and rounds them.

  Args:
    x: [B, T, C] or [B, T, H, C].
    rope: (cos, sin), [B, T, r / 2] each; transformers rounds them to BF16.
    inverse: by the negative angle.
  """
  cos, sin = rope
  if run.mode.rounding == "hf":
    cos, sin = run.ops.round(cos), run.ops.round(sin)
  width = 2 * cos.shape[-1]
  tail = x[..., -width:]
  if x.ndim == 4:
    cos, sin = cos[:, :, None], sin[:, :, None]
  turned = numerics.rotate_interleaved(tail, cos, sin, inverse=inverse)
  return jnp.concatenate([x[..., :-width], run.ops.round(turned)], axis=-1)


def hadamard(run: Run, x):
  """R(H x / √n), H the Sylvester matrix, over the last axis, whose length is a power of two."""
  width, lead = x.shape[-1], x.shape[:-1]
  half = 1
  while half < width:
    pairs = x.reshape(*lead, -1, 2, half)
    a, b = pairs[..., 0, :], pairs[..., 1, :]
    x = jnp.stack([a + b, a - b], axis=-2).reshape(*lead, width)
    half *= 2
  return run.ops.round(x * np.float32(width**-0.5))


@dataclasses.dataclass(frozen=True)
class Windows:
  """The windows that tokens of a call may close, J of them for each row.

  Attributes:
    first: int32 [B], index of the first.
    closed: bool [B, J].
    last_token: int32 [B, J], the token of the call that closes each.
  """

  first: jax.Array
  closed: jax.Array
  last_token: jax.Array

  @property
  def index(self):
    return self.first[:, None] + jnp.arange(self.closed.shape[1], dtype=jnp.int32)[None]


def windows_of(run: Run, ratio: int) -> Windows:
  """The windows of a call."""
  count = (ratio - 1 + run.tokens.shape[1]) // ratio
  first = quotient(run.start, ratio)
  ends = (first[:, None] + jnp.arange(count, dtype=jnp.int32)[None] + 1) * ratio
  last = jnp.clip(ends - 1 - run.start[:, None], 0, run.tokens.shape[1] - 1)
  return Windows(first, ends <= run.end[:, None], last)


def gather_windows(run: Run, ratio: int, count: int, rows, new):
  """Projections of each window's tokens: [B, count, slots, C], slots = m, or 2m with overlap.

  Args:
    rows: [B, R, F] of the state.
    new: [B, T, F] of the call.
  """
  overlap = rows.shape[1] == 2 * ratio
  source = jnp.concatenate([rows, new], axis=1)
  base = (quotient(run.start, ratio) * ratio)[:, None]
  position = base + jnp.arange(count * ratio, dtype=jnp.int32)[None]
  old = rows.shape[1] - ratio + position - base
  fresh = rows.shape[1] + jnp.minimum(position - run.start[:, None], new.shape[1] - 1)
  own = jnp.where(position < run.start[:, None], old, fresh)

  def take(at, channels):
    return take_rows(source[..., channels], at.reshape(-1, count, ratio))

  if not overlap:
    return take(own, slice(None))
  stored = jnp.broadcast_to(jnp.arange(ratio, dtype=jnp.int32)[None], (rows.shape[0], ratio))
  before = jnp.concatenate([stored, own[:, :-ratio]], axis=1)
  half = rows.shape[2] // 2
  return jnp.concatenate([take(before, slice(half)), take(own, slice(half, None))], axis=2)


def pool(run: Run, values, scores):
  """R(Σ_slots softmax(scores) · values) per channel: [B, J, slots, C] → [B, J, C]."""
  ops = run.ops
  weights = ops.softmax(jnp.swapaxes(scores, -1, -2))
  values = jnp.swapaxes(values, -1, -2)
  if run.mode.rounding == "hf":
    return ops.round(ops.sum(ops.round(ops.round(weights) * values)))
  return ops.round(ops.sum(ops.multiply(weights, values)))


class Compressor(nn.Module):
  """x [B, T, D] and the state → (entries [B, N / m, C] with the closed windows', state).

  Attributes:
    config: eps and hidden size.
    ratio: m.
    width: C.
    overlap: CSA.
    indexer: whether entries are rotated by a Hadamard matrix and quantised to FP4 for the indexer,
      instead of to FP8 for attention.
  """

  config: Config
  ratio: int
  width: int
  overlap: bool
  indexer: bool = False

  @nn.compact
  def __call__(self, run: Run, x, state: CompressorState, rope_of):
    """rope_of: function of positions [B, J] → (cos, sin)."""
    projected = (2 if self.overlap else 1) * self.width
    kv = self.param("kv", projection_init, (x.shape[-1], projected))
    gate = self.param("gate", projection_init, (x.shape[-1], projected))
    bias = self.param("position_bias", nn.initializers.zeros, (self.ratio, projected))
    weight = self.param("norm", nn.initializers.ones, (self.width,))
    # DeepSeek keeps both projections in float32.
    r = run.ops.round if run.mode.rounding == "hf" else lambda x: x
    values = r(run.ops.matmul(x, kv))
    scores = (
      r(run.ops.matmul(x, gate)) + bias.astype(jnp.float32)[remainder(run.positions, self.ratio)]
    )
    windows = windows_of(run, self.ratio)

    def close(_):
      shape = (self.ratio, windows.closed.shape[1])
      pooled = pool(
        run,
        gather_windows(run, *shape, state.values, values),
        gather_windows(run, *shape, state.scores, scores),
      )
      normed = rms_norm_once(run, pooled, weight, self.config.rms_norm_eps)
      rotated = rotate_tail(run, normed, rope_of(windows.index * self.ratio))
      return self.stored(run.quantizers_at(windows.last_token), rotated)

    out = (x.shape[0], windows.closed.shape[1], self.width)
    if out[1]:
      # Most decode steps close nothing; the pooling is then skipped.
      new = lax.cond(windows.closed.any(), close, lambda _: jnp.zeros(out, jnp.float32), None)
      rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
      at = jnp.where(windows.closed, windows.index, state.entries.shape[1])
      new = new.astype(state.entries.dtype) if self.indexer else store(run.mode, new)
      put = lambda held, new: held.at[rows, at].set(new, mode="drop")
      entries = jax.tree.map(put, state.entries, new)
    else:
      entries = state.entries
    return state.advance(run, self.ratio, values, scores, entries)

  def stored(self, run: Run, entries):
    """Entries [B, J, C] as the cache keeps them."""
    if self.indexer:
      return index_form(run, entries)
    return run.quantize_kv(quantize_leading(run, entries, self.config.rope_dim))


def quantize_leading(run: Run, x, rope_dim: int):
  """The simulated FP8 of a key-value vector: its unrotated channels in groups of 64."""
  if run.mode.activations != "qdq":
    return x
  leading = x[..., :-rope_dim]
  quantized = numerics.qdq_fp8(leading, min(64, leading.shape[-1]))
  return jnp.concatenate([run.blend(leading, quantized), x[..., -rope_dim:]], axis=-1)


def index_form(run: Run, x):
  """Queries and keys of the indexer: Hadamard, then simulated FP4; transformers has neither."""
  if run.mode.rounding != "reference":
    return x
  x = hadamard(run, x)
  if run.mode.activations != "qdq":
    return x
  return run.blend(x, numerics.qdq_fp4(x, min(32, x.shape[-1])))
