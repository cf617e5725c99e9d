"""Layers that families share: norms, gated MLPs, rotary embedding, token embedding and LM head."""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moejax import numerics
from moejax.models.indexing import take_rows
from moejax.models.run import Run

# Fan-in scaled; a checkpoint's numbers replace them wherever there is one.
projection_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
experts_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
)
embedding_init = nn.initializers.normal(0.02)


def weight_rows(weight, x):
  """A vector of weights in float32, at x's shape."""
  return jnp.broadcast_to(weight.astype(jnp.float32), x.shape)


def rms_norm(run: Run, x, weight, eps: float):
  """R(w · R(x / rms)), [..., N]: transformers rounds before the weight and after it."""
  normed = run.ops.round(run.ops.normalize(x, eps))
  return run.ops.round(normed * weight_rows(weight, x))


def silu_times_up(run: Run, gate_up):
  """R(silu(gate)) · up, unrounded: [..., 2F] → [..., F]."""
  gate, up = jnp.split(gate_up, 2, axis=-1)
  return run.ops.round(run.ops.silu(gate)) * up


class GatedMlp(nn.Module):
  """R(W_down R(act(R(W_gate x), R(W_up x)))), [..., D] → [..., D].

  Attributes:
    inner: F.
    activate: function of (run, [..., 2F]) → [..., F].
  """

  inner: int
  activate: Callable = silu_times_up

  @nn.compact
  def __call__(self, run: Run, x):
    gate_up = self.param("gate_up", projection_init, (x.shape[-1], 2 * self.inner))
    down = self.param("down", projection_init, (self.inner, x.shape[-1]))
    hidden = run.ops.round(run.ops.matmul(run.quantize(x), gate_up))
    hidden = run.ops.round(self.activate(run, hidden))
    return run.ops.round(run.ops.matmul(run.quantize(hidden), down))


@functools.lru_cache(maxsize=16)
def _rope_constants(frequencies: tuple[float, ...], length: int):
  return numerics.rope_tables(np.arange(length), np.asarray(frequencies, np.float32))


def rope_at(frequencies: np.ndarray, length: int, positions):
  """Cosines and sines at positions int32 [B, T] below `length`: float32 [B, T, C / 2] each.

  The tables are constants of a program, but only gathered from: nothing for a compiler to fold.
  """
  tables = _rope_constants(tuple(map(float, frequencies)), length)
  return tuple(jnp.asarray(table)[jnp.clip(positions, 0, length - 1)] for table in tables)


def rope_half(run: Run, x, cos, sin):
  """R(R(x · cos) + R(rot(x) · sin)) with rounded tables, transformers' rotation: x [B, T, H, C]."""
  r = run.ops.round
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = (jnp.broadcast_to(r(t)[:, :, None], first.shape) for t in (cos, sin))
  turned = (r(r(first * cos) - r(second * sin)), r(r(second * cos) + r(first * sin)))
  return jnp.concatenate(turned, axis=-1)


def logit_tokens(run: Run, x):
  """The tokens whose logits are wanted (`Taps.logits`): [B, T, ...] → [B, T - first or 1, ...]."""
  first = run.taps.logits
  if first != "last":
    if first >= x.shape[1]:
      raise ValueError(f"taps: logits from token {first} on, of a call of {x.shape[1]} tokens.")
    return x[:, first:]
  # The last that is not padding.
  at = jnp.maximum(run.end - run.start - 1, 0)
  return take_rows(x, at[:, None])


def embed(run: Run, table):
  """[V, D] → float32 [B, T, D]; padding reads row 0."""
  return run.ops.round(table[jnp.maximum(run.tokens, 0)].astype(jnp.float32))


def lm_logits(run: Run, x, table, head):
  """x [B, T, D] → float32 [B, T, V], unrounded; the head [D, V], or None for the table [V, D]."""
  return run.ops.matmul_transposed(x, table) if head is None else run.ops.matmul(x, head)


def stream_delta(run: Run, x, layer: int):
  """Applies the execution's endpoint delta to the state x [B, T, ...] after a block."""
  delta = run.execution.delta
  if delta is None:
    return x
  value = jnp.broadcast_to(delta.value, (x.shape[0], *x.shape[2:]))[:, None]
  here = (run.positions == delta.position) & (delta.layer == layer)
  here = here.reshape(*here.shape, *[1] * (x.ndim - 2))
  if value.dtype == jnp.uint32:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ value
    changed = jax.lax.bitcast_convert_type(bits, jnp.float32)
  else:
    changed = x + value
  return jnp.where(here, changed, x)
