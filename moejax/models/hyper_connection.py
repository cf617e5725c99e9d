"""Manifold-constrained hyper-connections (mHC) of DeepSeek-V4: several residual streams, mixed.

Before a branch the streams X [B, T, n, D] collapse into its input; after it, its output and the
mixed streams make the new ones. The mixing matrix is made doubly stochastic by Sinkhorn steps.
"""

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.models.arithmetic import arithmetic
from moejax.models.config import Config
from moejax.models.execution import Mode
from moejax.models.run import Run
from moejax.numerics import materialize


def mixes(run: Run, streams, fn, eps: float):
  """The weights' logits: streams [B, T, n, D] · fn [n · D, M], over the streams' rms → [B, T, M].

  DeepSeek divides after the product, transformers before it.
  """
  flat = streams.reshape(*streams.shape[:2], -1)
  if run.mode.rounding != "hf":
    return run.ops.divide(run.ops.matmul_f32(flat, fn), run.ops.root_mean_square(flat, eps))
  return run.ops.matmul_f32(run.ops.normalize(flat, eps), fn)


def affine(run: Run, x, scale, base):
  """x · scale + base, [B, T, M], scale and base [M]."""
  scaled = run.ops.multiply(x, jnp.broadcast_to(scale, x.shape))
  return scaled + jnp.broadcast_to(base, x.shape)


def collapse(run: Run, streams, weights):
  """Σ_i weights_i · stream_i: [B, T, n, D], [B, T, n] → [B, T, D]."""
  return run.ops.weighted_sum(streams, weights[..., None])[:, :, 0]


def sinkhorn(run: Run, logits, iterations: int, eps: float):
  """Row softmax, then alternate normalisation ending on columns: [B, T, n, n] (source, dest)."""
  if run.mode.arithmetic == "fast":
    return _sinkhorn_tokens_last(logits, iterations, eps)

  def over_dest(c):
    return run.ops.divide(c, (run.ops.sum(c) + np.float32(eps))[..., None])

  def over_source(c):
    return jnp.swapaxes(over_dest(jnp.swapaxes(c, -1, -2)), -1, -2)

  c = over_source(run.ops.softmax(logits) + np.float32(eps))
  # A loop, not unrolled: twenty copies of this are slow to compile.
  return lax.fori_loop(0, iterations - 1, lambda _, c: over_source(over_dest(c)), c)


def _sinkhorn_tokens_last(logits, iterations: int, eps: float):
  """As `sinkhorn` on [n, n, B · T], where vectors run along tokens: 14 times faster."""
  n = logits.shape[-1]
  c = jnp.moveaxis(logits.reshape(-1, n, n), 0, -1)
  over = lambda axis: lambda c: c / (c.sum(axis=axis, keepdims=True) + np.float32(eps))
  over_source, over_dest = over(0), over(1)
  c = over_source(jax.nn.softmax(c, axis=1) + np.float32(eps))
  c = lax.fori_loop(0, iterations - 1, lambda _, c: over_source(over_dest(c)), c)
  return jnp.moveaxis(c, -1, 0).reshape(logits.shape)


class HyperConnection(nn.Module):
  """Weights of one site: streams → (input of the branch [B, T, D], `expand` arguments)."""

  config: Config

  @nn.compact
  def __call__(self, run: Run, streams):
    c, n = self.config, self.config.hc_mult
    fn = self.param("fn", nn.initializers.normal(0.02), (n * c.hidden_size, (2 + n) * n))
    base = self.param("base", nn.initializers.zeros, ((2 + n) * n,))
    scale = self.param("scale", nn.initializers.ones, (3,))
    scales = jnp.repeat(scale, np.array([n, n, n * n]), total_repeat_length=(2 + n) * n)
    m = affine(run, mixes(run, streams, fn, c.rms_norm_eps), scales, base)
    gates, comb = run.ops.sigmoid(m[..., : 2 * n]), m[..., 2 * n :]
    pre = gates[..., :n] + np.float32(c.hc_eps)
    post = np.float32(2) * gates[..., n:]
    comb = sinkhorn(run, comb.reshape(*comb.shape[:2], n, n), c.hc_iterations, c.hc_eps)
    # In memory, or XLA computes them again for every reader.
    x = materialize(run.ops.round(collapse(run, streams, pre)))
    return x, (materialize(post), materialize(comb))


def expand(run: Run, streams, branch, weights):
  """The new streams: X'_j = post_j · branch + Σ_i comb_ij X_i, rounded once (transformers: thrice).

  Args:
    streams: [B, T, n, D].
    branch: [B, T, D].
    weights: of `HyperConnection`.

  Returns:
    (float32 [B, T, n, D] of BF16 values, [B, T, n, D + 1] that `close` makes them of).
  """
  post, comb = weights
  r = _inner_round(run.mode)
  mixed, post = r(run.ops.weighted_sum(streams, r(comb))), r(post)[..., None]
  return _add(run.mode, mixed, post, branch), jnp.concatenate([mixed, post], axis=-1)


def close(mode: Mode, closing, branch):
  """The new streams [..., n, D] of what `expand` returned with them and a branch [..., D]."""
  return _add(mode, closing[..., :-1], closing[..., -1:], branch)


def _add(mode: Mode, mixed, post, branch):
  ops = arithmetic(mode)
  pair = (jnp.broadcast_to(x, mixed.shape) for x in (post, branch[..., None, :]))
  streams = ops.round(_inner_round(mode)(ops.multiply(*pair)) + mixed)
  # Without this XLA fuses through the streams, and compile time grows exponentially with depth.
  return materialize(streams)


def _inner_round(mode: Mode):
  """What transformers does to the parts of the sum, and DeepSeek does not."""
  return (lambda x: x) if mode.rounding == "reference" else arithmetic(mode).round


class HyperHead(nn.Module):
  """The final collapse of the streams: [B, T, n, D] → [B, T, D]."""

  config: Config

  @nn.compact
  def __call__(self, run: Run, streams):
    c, n = self.config, self.config.hc_mult
    fn = self.param("fn", nn.initializers.normal(0.02), (n * c.hidden_size, n))
    base = self.param("base", nn.initializers.zeros, (n,))
    scale = self.param("scale", nn.initializers.ones, (1,))
    m = affine(run, mixes(run, streams, fn, c.rms_norm_eps), jnp.repeat(scale, n), base)
    weights = run.ops.sigmoid(m) + np.float32(c.hc_eps)
    return run.ops.round(collapse(run, streams, weights))
