"""DeepSeek-V4's attention: one key-value vector per token, a window, compressed entries and a sink.

Each query reads a compact list: window entries oldest to newest, then compressed ones (CSA: by
indexer score descending, then index; HCA: ascending). Ring rotation, padding and what lies unused
in a cache therefore cannot reach a sum.
"""

import functools

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.models.compressor import (
  Compressor,
  index_form,
  quantize_leading,
  rms_norm_once,
  rotate_tail,
)
from moejax.models.deepseek_v4_config import DeepseekV4Config
from moejax.models.indexing import quotient, take_rows
from moejax.models.layers import projection_init
from moejax.models.packed_cache import load, store
from moejax.models.rings import overwrite
from moejax.models.run import Run
from moejax.models.sparse_state import SparseCache, window_and_entries

_MASKED = np.float32(-np.inf)


class Indexer(nn.Module):
  """The lightning indexer: which compressed entries each query reads, best first.

  Attributes:
    config: sizes.
    ratio: m.
  """

  config: DeepseekV4Config
  ratio: int

  @nn.compact
  def __call__(self, run: Run, x, q_rank, state, rope, rope_of):
    """x [B, T, D], q_rank [B, T, R] → (chosen int32 [B, T, k], state)."""
    c, ops = self.config, run.ops
    compressor = Compressor(c, self.ratio, c.index_dim, True, indexer=True, name="compressor")
    state = compressor(run, x, state, rope_of)
    wq = self.param("q", projection_init, (q_rank.shape[-1], c.index_heads * c.index_dim))
    wp = self.param("weights", projection_init, (x.shape[-1], c.index_heads))
    q = ops.round(ops.matmul(run.quantize(q_rank), wq))
    q = q.reshape(*q.shape[:2], c.index_heads, c.index_dim)
    q = index_form(run, rotate_tail(run, q, rope))
    scores = self.scores(run, q, state.entries, ops.round(ops.matmul(x, wp)))
    visible = quotient(run.positions + 1, self.ratio)[..., None]
    hidden = lax.broadcasted_iota(jnp.int32, scores.shape, 2) >= visible
    # +0: top_k ranks -0 below it; of equals it takes the lowest index.
    scores = jnp.where(hidden, _MASKED, scores + np.float32(0))
    chosen = lax.top_k(scores, min(c.index_topk, scores.shape[-1]))[1]
    return chosen.astype(jnp.int32), state

  def scores(self, run: Run, q, entries, weights):
    """Σ_h relu(q_h · k) · w_h: float32 [B, T, N]; DeepSeek holds every step in BF16."""
    c, ops = self.config, run.ops
    batch, time, heads, width = q.shape
    lengths = jnp.repeat(quotient(run.positions + 1, self.ratio), heads, axis=1)
    dots = ops.batched(q.reshape(batch, time * heads, width), entries, lengths, transposed=True)
    dots = jnp.swapaxes(dots.reshape(batch, time, heads, -1), -1, -2)
    weights = jnp.broadcast_to(weights[:, :, None], dots.shape)
    if run.mode.rounding == "reference":
      r, scale = ops.round, np.float32(c.index_dim**-0.5 * c.index_heads**-0.5)
      return r(ops.sum(r(nn.relu(r(dots)) * r(weights * scale))))
    scaled = ops.multiply(nn.relu(dots), np.float32(c.index_dim**-0.5))
    weights = ops.multiply(weights, np.float32(c.index_heads**-0.5))
    return ops.sum(ops.multiply(scaled, weights))


def sink_attention(run: Run, q, keys, lengths, sinks):
  """Attention over each query's own list, with a sink logit per head in the denominator.

  Args:
    q: [B, T, H, C].
    keys: [B, T, n, C], values as well.
    lengths: int32 [B, T], how many of them count.
    sinks: float32 [H].

  Returns:
    [B, T, H, C], rounded.
  """
  batch, time, heads, width = q.shape
  rows = (batch * time, heads, width)
  keys, q = keys.reshape(rows[0], *keys.shape[2:]), q.reshape(rows)
  lengths = jnp.broadcast_to(lengths.reshape(rows[0], 1), rows[:2])
  scores = run.ops.batched(q, keys, lengths, transposed=True)
  seen = lax.broadcasted_iota(jnp.int32, scores.shape, 2) < lengths[..., None]
  values = lambda p: run.ops.batched(p, keys, lengths)
  return sink_softmax(run, scores, seen, sinks[None, :], width, values).reshape(
    batch, time, heads, width
  )


def sink_softmax(run: Run, scores, seen, sinks, width: int, weigh):
  """The softmax with a sink, and its weighted values: DeepSeek's rounding or transformers'.

  Args:
    scores: float32 [..., H, n], unscaled.
    seen: bool like scores.
    sinks: float32 [..., H].
    width: C.
    weigh: function of probabilities [..., H, n] → Σ p v, [..., H, C].
  """
  ops = run.ops
  r = ops.round if run.mode.rounding == "hf" else lambda x: x
  scores = r(r(scores) * np.float32(width**-0.5))
  scores = jnp.where(seen, scores, _MASKED)
  sinks = jnp.broadcast_to(sinks[..., None], (*scores.shape[:-1], 1))
  if run.mode.rounding == "hf":
    p = ops.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]
    return ops.round(weigh(ops.round(p)))
  top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
  e = ops.exp(scores - top)
  total = ops.sum(e)[..., None] + ops.exp(sinks - top)
  out = weigh(ops.round(e))
  return ops.round(ops.divide(out, total))


def dense_attention(run: Run, q, source, index, lengths, sinks):
  """`sink_attention` for many queries of one row at once, by mask: plain XLA only.

  Args:
    q: [B, T, H, C].
    source: [B, S, C], everything that any query may read.
    index: int32 [B, T, n] into it, as `window_and_entries` gives it.
    lengths: int32 [B, T].
  """
  used = lax.broadcasted_iota(jnp.int32, index.shape, 2) < lengths[..., None]
  row = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None, None]
  token = jnp.arange(index.shape[1], dtype=jnp.int32)[None, :, None]
  at = jnp.where(used, index, source.shape[1])
  seen = (
    jnp.zeros((*index.shape[:2], source.shape[1]), bool)
    .at[row, token, at]
    .set(True, mode="drop")[:, :, None]
  )
  batch, time, heads, width = q.shape
  rows = q.reshape(batch, time * heads, width)
  scores = run.ops.batched(rows, source, transposed=True).reshape(batch, time, heads, -1)
  weigh = lambda p: run.ops.batched(p.reshape(batch, time * heads, -1), source).reshape(q.shape)
  seen = jnp.broadcast_to(seen, scores.shape)
  return sink_softmax(run, scores, seen, sinks[None, None], width, weigh)


class SparseAttention(nn.Module):
  """x [B, T, D] → (attention output [B, T, D], cache).

  Attributes:
    config: sizes.
    layer: its kind is in the config.
  """

  config: DeepseekV4Config
  layer: int

  @nn.compact
  def __call__(self, run: Run, x, cache: SparseCache, rope_of):
    """rope_of: function of positions [B, n] → (cos, sin) for this kind of layer."""
    c = self.config
    rope = rope_of(run.positions)
    q_rank, q = self.queries(run, x, rope)
    kv = self.key_values(run, x, rope)
    chosen, num_entries, compressor, indexer = self.compressed(run, x, q_rank, cache, rope, rope_of)
    index, lengths = window_and_entries(run, cache.window, kv, num_entries, chosen)
    new = store(run.mode, kv)
    source = [cache.window, new] if compressor is None else [cache.window, new, compressor.entries]
    source = jnp.concatenate([load(run.mode, part) for part in source], axis=1)
    sinks = self.param("sinks", nn.initializers.zeros, (c.num_heads,)).astype(jnp.float32)
    if run.mode.arithmetic == "fast":
      out = dense_attention(run, q, source, index, lengths, sinks)
    else:
      out = sink_attention(run, q, take_rows(source, index), lengths, sinks)
    out = self.project_out(run, rotate_tail(run, out, rope, inverse=True))
    window = jax.tree.map(functools.partial(overwrite, run), cache.window, new)
    return out, cache.replace(window=window, compressor=compressor, indexer=indexer)

  def linear(self, run: Run, name: str, x, width: int):
    weight = self.param(name, projection_init, (x.shape[-1], width))
    return run.ops.round(run.ops.matmul(run.quantize(x), weight))

  def norm(self, run: Run, name: str, x):
    weight = self.param(name, nn.initializers.ones, (x.shape[-1],))
    return rms_norm_once(run, x, weight, self.config.rms_norm_eps)

  def queries(self, run: Run, x, rope):
    """(the low-rank query [B, T, R], queries [B, T, H, C] normed and rotated)."""
    c = self.config
    q_rank = self.norm(run, "q_norm", self.linear(run, "q_a", x, c.q_rank))
    q = self.linear(run, "q_b", q_rank, c.num_heads * c.head_dim)
    q = head_norm(run, q.reshape(*q.shape[:2], c.num_heads, c.head_dim), c.rms_norm_eps)
    return q_rank, rotate_tail(run, q, rope)

  def key_values(self, run: Run, x, rope):
    """[B, T, C] as the window keeps them."""
    c = self.config
    kv = self.norm(run, "kv_norm", self.linear(run, "kv", x, c.head_dim))
    return run.quantize_kv(quantize_leading(run, rotate_tail(run, kv, rope), c.rope_dim))

  def compressed(self, run: Run, x, q_rank, cache: SparseCache, rope, rope_of):
    """(chosen [B, T, k], how many count [B, T], compressor state, indexer state)."""
    c, ratio = self.config, cache.ratio
    if cache.compressor is None:
      none = jnp.zeros((*x.shape[:2], 0), jnp.int32)
      return none, jnp.zeros(x.shape[:2], jnp.int32), None, None
    overlap = cache.indexer is not None
    compressor = Compressor(c, ratio, c.head_dim, overlap, name="compressor")
    state = compressor(run, x, cache.compressor, rope_of)
    visible = quotient(run.positions + 1, ratio)
    if overlap:
      indexer = Indexer(c, ratio, name="indexer")
      chosen, index_state = indexer(run, x, q_rank, cache.indexer, rope, rope_of)
      return chosen, jnp.minimum(visible, chosen.shape[-1]), state, index_state
    chosen = lax.broadcasted_iota(jnp.int32, (*x.shape[:2], state.entries.shape[1]), 2)
    return chosen, visible, state, None

  def project_out(self, run: Run, out):
    """Two steps: within groups of heads, then together: [B, T, H, C] → [B, T, D]."""
    c = self.config
    batch, time = out.shape[:2]
    inner = c.num_heads * c.head_dim // c.o_groups
    weight = self.param("o_a", projection_init, (c.o_groups, inner, c.o_rank))
    grouped = out.reshape(batch * time, c.o_groups, inner).transpose(1, 0, 2)
    grouped = run.ops.round(run.ops.batched(grouped, weight))
    grouped = grouped.transpose(1, 0, 2).reshape(batch, time, c.o_groups * c.o_rank)
    return self.linear(run, "o_b", grouped, c.hidden_size)


def head_norm(run: Run, q, eps: float):
  """q / rms over the last axis, without a weight, in the rounding of the mode.

  DeepSeek computes it in BF16 throughout; transformers rounds the reciprocal root.
  """
  ops, r = run.ops, run.ops.round
  if run.mode.rounding == "reference":
    mean = r(ops.divide(ops.sum(r(q * q)), np.float32(q.shape[-1])))
    root = jnp.sqrt(r(mean + np.float32(eps)))[..., None]
  else:
    root = ops.root_mean_square(q, eps)
  return r(q * jnp.broadcast_to(r(ops.divide(jnp.ones_like(root), root)), q.shape))
