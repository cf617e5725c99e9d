"""What a block is told besides its parameters, its state and its input."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax import numerics
from moejax.models.arithmetic import arithmetic, Canonical, Fast
from moejax.models.execution import Execution, Mode, Taps


@dataclasses.dataclass(frozen=True)
class Run:
  """One forward pass, or one layer of it.

  Attributes:
    mode: the static choices; `ops` is their arithmetic.
    taps: what to trace.
    execution: of the whole pass, or of one layer with leading axes [B, T] (`at_layer`).
    tokens: int32 [B, T]; a negative token is padding, at the end of a row only.
    start: int32 [B], position of the first token.
    length: positions that the state was made for.
  """

  mode: Mode
  taps: Taps
  execution: Execution
  tokens: jax.Array
  start: jax.Array
  length: int

  @property
  def ops(self) -> Canonical | Fast:
    return arithmetic(self.mode)

  @property
  def valid(self):
    """bool [B, T], false for padding."""
    return self.tokens >= 0

  @property
  def positions(self):
    """int32 [B, T], absolute."""
    return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]

  @property
  def end(self):
    """int32 [B], the position after the last token that is not padding."""
    return self.start + self.valid.astype(jnp.int32).sum(axis=1)

  def at_layer(self, layer: int, num_layers: int, top_k: int, num_experts: int) -> "Run":
    """This pass as one of its layers sees it."""
    shape = (num_layers, *self.tokens.shape)
    execution = self.execution.at_layer(layer, shape, top_k, num_experts)
    return dataclasses.replace(self, execution=execution)

  def quantize(self, x):
    """x [B, T, ..., N] as a linear layer reads it: the simulated activation quantiser, if any.

    FP8 has a scale for every 128 channels, INT8 one for each token.
    """
    kind = self.mode.activations
    if kind == "none":
      return x
    if kind == "qdq":
      return self.blend(x, numerics.qdq_fp8(x, min(128, x.shape[-1])))
    return self.blend(x, numerics.fake_quantize(x, 8))

  def quantizers_at(self, index) -> "Run":
    """This run with the quantisers of tokens index [B, J]: their bits and strengths."""
    names, e = ("kv_bits", "kv_strength", "activation_strength"), self.execution
    taken = {
      name: jnp.take_along_axis(value, index, axis=1)
      for name in names
      if (value := getattr(e, name)) is not None
    }
    return dataclasses.replace(self, execution=e.replace(**taken))

  def blend(self, x, quantized):
    """R(x + strength · (quantized - x)) for the activation strength: x at 0, quantized at 1."""
    return self._blend(x, quantized, self.execution.activation_strength)

  def quantize_kv(self, x):
    """x [B, T, ..., C] as the cache keeps it: the simulated KV quantiser, if any (route paper)."""
    bits = self.execution.kv_bits
    if bits is None:
      return x
    bits = jnp.broadcast_to(bits.reshape(*bits.shape, *[1] * (x.ndim - 3)), x.shape[:-1])
    quantized = numerics.fake_quantize(x, jnp.maximum(bits, 2))
    blended = self._blend(x, quantized, self.execution.kv_strength)
    return jnp.where(bits[..., None] == 0, x, blended)

  def _blend(self, x, quantized, strength):
    if strength is None:
      return self.ops.round(quantized)
    strength = strength.reshape(*strength.shape, *[1] * (x.ndim - strength.ndim))
    s = jnp.broadcast_to(strength, x.shape)
    partly = x + self.ops.multiply(s, quantized - x)
    return jnp.where(s == 0, x, self.ops.round(jnp.where(s == 1, quantized, partly)))
