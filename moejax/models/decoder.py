"""The decoder that OLMoE, Qwen, DeepSeek-MoE and Mixtral share: pre-norm residual blocks.

A family is one small file: how its config is read, and a `Decoder` that names its attention, its
MoE and its contract. Shapes: B rows, T tokens, D hidden size.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from moejax.combine import Contract
from moejax.models import layers, router
from moejax.models.arithmetic import arithmetic, Canonical, Fast
from moejax.models.attention import Attention
from moejax.models.config import Config
from moejax.models.execution import DEFAULT, Execution, Mode, NATIVE, NOTHING, Taps
from moejax.models.model import Model
from moejax.models.moe import combine_terms, Experts, route_trace
from moejax.models.packed_cache import PackedKvCache
from moejax.models.run import Run
from moejax.models.state import KvCache, PersistentState
from moejax.numerics import inverse_frequencies, materialize


class SparseMoe(nn.Module):
  """Router, experts and combine: [B, T, D] → (output [B, T, D], trace entries)."""

  config: Config

  def route(self, run: Run, x) -> tuple[router.Route, jax.Array]:
    """(route, router logits): float32 softmax over BF16 logits of all experts, then top-k."""
    c = self.config
    weight = self.param("router", layers.projection_init, (x.shape[-1], c.num_experts))
    logits = router.router_logits(run, x, weight, "bfloat16")
    probabilities = run.ops.softmax(logits)
    selection = router.select(run, probabilities, logits, c.top_k)
    weights = router.weigh(run, probabilities, selection.ids, normalize=c.norm_topk_prob)
    return router.finish(run, selection, weights), logits

  def shared(self, run: Run, x) -> jax.Array | None:
    """The shared expert's output [B, T, D] as it is merged; None without one."""
    return None

  @nn.compact
  def __call__(self, run: Run, x, contract: Contract):
    route, logits = self.route(run, x)
    experts = Experts(self.config.num_experts, self.config.expert_size, name="experts")
    terms = experts(run, x, route, contract)
    output, trace = combine_terms(run, terms, route, self.shared(run, x), contract)
    return output, {**route_trace(route, logits), **trace}


class Block(nn.Module):
  """x + attention(norm(x)), then + ffn(norm(x)).

  Attributes:
    config: sizes.
    layer: index.
    attention, moe: module classes; moe is None for a dense layer.
  """

  config: Config
  layer: int
  attention: Any
  moe: Any

  @nn.compact
  def __call__(self, run: Run, x, cache: KvCache, rope, contract: Contract):
    """x float32 [B, T, D] → (x, cache, trace entries)."""
    c = self.config

    def normed(name, x):
      weight = self.param(name, nn.initializers.ones, (c.hidden_size,))
      return layers.rms_norm(run, x, weight, c.rms_norm_eps)

    attention = self.attention(config=c, name="attention")
    out, cache = attention(run, normed("attention_norm", x), cache, rope)
    # In memory, or XLA computes it again for every reader.
    x = closing = materialize(run.ops.round(x + out))
    h = normed("ffn_norm", x)
    if self.moe is None:
      out, trace = layers.GatedMlp(c.dense_size, name="mlp")(run, h), {}
    else:
      out, trace = self.moe(config=c, name="moe")(run, h, contract)
    x = layers.stream_delta(run, close_block(run.ops, closing, out), self.layer)
    return materialize(x), cache, {**trace, "closing": closing, "post_block": x}


def close_block(ops: Canonical | Fast, x, output):
  """R(x + output)."""
  return ops.round(x + output)


class Decoder(Model):
  """Token embedding, blocks, final norm and LM head, with transformers' rounding points.

  Families override the class attributes `attention` and `moe`, and the methods of `Model`.
  """

  attention = Attention
  moe = SparseMoe

  def close_block(self, mode: Mode, closing, output):
    return close_block(arithmetic(mode), closing, output)

  def layer_state(self, layer: int, batch: int, length: int, mode: Mode):
    shape = (batch, self.config.num_kv_heads, length, self.config.head_dim)
    if mode.packed_kv:
      return PackedKvCache.empty(shape, mode)
    return KvCache(*[jnp.zeros(shape, mode.dtype)] * 2)

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    state: PersistentState,
    execution: Execution = NATIVE,
    *,
    mode: Mode = DEFAULT,
    taps: Taps = NOTHING,
  ) -> tuple[jax.Array, PersistentState, dict[str, jax.Array]]:
    """See `Model`."""
    c = self.config
    run = self.start(tokens, state, execution, mode, taps)
    contract = self.contract(mode)
    rope = layers.rope_at(inverse_frequencies(c.head_dim, c.rope_theta), run.length, run.positions)
    table = self.param("embed", layers.embedding_init, (c.vocab_size, c.hidden_size))

    def block(layer, run, x, cache):
      moe = self.moe if layer in c.moe_layers else None
      module = Block(c, layer, self.attention, moe, name=f"layers_{layer}")
      return module(run, x, cache, rope, contract)

    x, state, trace = self.run_blocks(run, layers.embed(run, table), state, block)
    x = layers.logit_tokens(run, x)
    norm = self.param("norm", nn.initializers.ones, (c.hidden_size,))
    x = layers.rms_norm(run, x, norm, c.rms_norm_eps)
    head = None
    if not c.tie_embeddings:
      head = self.param("head", layers.projection_init, (c.hidden_size, c.vocab_size))
    return run.ops.round(layers.lm_logits(run, x, table, head)), state, trace
