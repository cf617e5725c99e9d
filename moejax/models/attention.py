"""Attention over a cache of keys and values, as transformers' eager form rounds it.

The cache holds one entry per position, oldest first; a query at position p reads entries 0 .. p and
nothing behind them, so that what lies there cannot reach a sum.
"""

from flax import linen as nn
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import Config
from moejax.models.layers import projection_init, rms_norm, rope_half
from moejax.models.run import Run
from moejax.models.state import KvCache

_MASKED = np.float32(-np.inf)


def attend(run: Run, q, keys, values, *, divide_by_root: bool = False):
  """q [B, T, H, C] over keys and values [B, Hkv, N, C] → R(Σ p v), [B, T, H · C].

  Scores, scaled scores and probabilities are rounded. Query head h reads key-value head
  h // (H / Hkv).

  Args:
    run: positions say how many entries a query sees.
    q: BF16 values, rotated.
    keys, values: one entry per position, those of this call among them.
    divide_by_root: scores are divided by √C instead of multiplied by C^-½ (DeepSeek-MoE).
  """
  ops = run.ops
  batch, time, heads, width = q.shape
  kv_heads = keys.shape[1]
  group = heads // kv_heads
  rows = q.reshape(batch, time, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
  rows = rows.reshape(batch, kv_heads, time * group, width)
  lengths = jnp.repeat(run.positions + 1, group, axis=1)[:, None]  # [B, 1, T · group]
  scores = ops.round(ops.batched(rows, keys, lengths, transposed=True))
  if divide_by_root:
    scores = ops.divide(scores, np.float32(np.sqrt(width)))
  else:
    scores = scores * np.float32(width**-0.5)
  scores = ops.round(scores)
  seen = lax.broadcasted_iota(jnp.int32, scores.shape, 3) < lengths[..., None]
  probabilities = ops.round(ops.softmax(jnp.where(seen, scores, _MASKED)))
  out = ops.round(ops.batched(probabilities, values, lengths))
  out = out.reshape(batch, kv_heads, time, group, width).transpose(0, 2, 1, 3, 4)
  return out.reshape(batch, time, heads * width)


class Attention(nn.Module):
  """Causal self-attention with rotary positions and grouped keys: R(W_o attend(...)), [B, T, D].

  A family overrides `project`, where its norms, biases and clips are.
  """

  config: Config
  divide_by_root: bool = False

  @property
  def has_bias(self) -> bool:
    """Whether q, k and v have a bias."""
    return False

  def linear(self, run: Run, name: str, x, width: int, bias: bool):
    """R(x W + b): one rounding, the bias inside."""
    weight = self.param(name, projection_init, (x.shape[-1], width))
    out = run.ops.matmul(run.quantize(x), weight)
    if bias:
      b = self.param(f"{name}_bias", nn.initializers.zeros, (width,))
      out = out + jnp.broadcast_to(b.astype(jnp.float32), out.shape)
    return run.ops.round(out)

  def norm(self, run: Run, name: str, x):
    """RMS norm over the last axis."""
    weight = self.param(name, nn.initializers.ones, (x.shape[-1],))
    return rms_norm(run, x, weight, self.config.rms_norm_eps)

  def projections(self, run: Run, x):
    """q [B, T, H · C], k and v [B, T, Hkv · C]."""
    c = self.config
    heads = (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
    return tuple(self.linear(run, name, x, n * c.head_dim, self.has_bias) for name, n in heads)

  def project(self, run: Run, x):
    """q [B, T, H, C], k and v [B, T, Hkv, C], before rotation."""
    return tuple(map(self.split, self.projections(run, x)))

  def split(self, x):
    """[B, T, H · C] → [B, T, H, C]."""
    return x.reshape(*x.shape[:-1], -1, self.config.head_dim)

  @nn.compact
  def __call__(self, run: Run, x, cache: KvCache, rope):
    q, k, v = self.project(run, x)
    q, k = rope_half(run, q, *rope), rope_half(run, k, *rope)
    k, v = run.quantize_kv(k), run.quantize_kv(v)
    cache, readings = cache.update(run, k, v)
    out = None
    for keys, values, seen in readings:
      part = attend(run, q, keys, values, divide_by_root=self.divide_by_root)
      out = part if out is None else jnp.where(seen[..., None], part, out)
    return self.linear(run, "o", out, self.config.hidden_size, bias=False), cache
