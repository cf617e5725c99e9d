"""DeepSeek-V4: hyper-connected streams, window and compressed attention, hash and top-k routing.

"reference" rounds and sums where the inference code released with the weights does, "hf" where
transformers does. The multi-token-prediction block is not part of it.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import Contract
from moejax.models import deepseek_v4_names, layers, router
from moejax.models.compressor import rms_norm_once
from moejax.models.config import Fields
from moejax.models.deepseek_v4_config import CSA, DeepseekV4Config, read_config, write_config
from moejax.models.execution import DEFAULT, Execution, Mode, NATIVE, NOTHING, Taps
from moejax.models.hyper_connection import close, expand, HyperConnection, HyperHead
from moejax.models.model import Model
from moejax.models.moe import combine_terms, Experts, route_trace, transformers_contract
from moejax.models.packed_cache import empty
from moejax.models.run import Run
from moejax.models.sparse_attention import SparseAttention
from moejax.models.sparse_state import CompressorState, SparseCache
from moejax.models.state import PersistentState
from moejax.models.tensors import Tensor


def distinct_experts(key, shape: tuple[int, int], num_experts: int):
  """A hash table without a checkpoint: int32 [V, K], distinct experts for each token."""
  rows = jax.random.uniform(key, (shape[0], num_experts))
  return jnp.argsort(rows, axis=1)[:, : shape[1]].astype(jnp.int32)


class DeepseekV4Moe(nn.Module):
  """Router, experts, combine and shared expert: [B, T, D] → (output, trace entries)."""

  config: DeepseekV4Config
  layer: int

  def activate(self, run: Run, gate_up):
    """silu(min(gate, limit)) · clip(up): [..., 2F] → [..., F], unrounded."""
    limit = np.float32(self.config.swiglu_limit)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    s = run.ops.silu(gate)
    return (s if run.mode.rounding == "reference" else run.ops.round(s)) * up

  def route(self, run: Run, x):
    c, ops = self.config, run.ops
    weight = self.param("router", layers.projection_init, (x.shape[-1], c.num_experts))
    own = "bfloat16" if run.mode.rounding == "hf" else "float32"
    rounded = router.router_dtype(run, own) == "bfloat16"
    logits = router.router_logits(run, x, weight, own)
    scores = (
      ops.round(jnp.sqrt(ops.round(ops.softplus(logits)))) if rounded else ops.sqrt_softplus(logits)
    )
    if self.layer in c.hash_layers:
      table = self.param("hash_table", distinct_experts, (c.vocab_size, c.top_k), c.num_experts)
      selection = router.by_table(table[jnp.maximum(run.tokens, 0)])
    else:
      bias = self.param("router_bias", nn.initializers.zeros, (c.num_experts,))
      biased = scores + layers.weight_rows(bias, scores)
      selection = router.select(run, biased, biased, c.top_k)
    # transformers always normalises, whatever norm_topk_prob says.
    weights = router.weigh(
      run,
      scores,
      selection.ids,
      normalize=c.norm_topk_prob,
      epsilon=1e-20,
      scale=c.routed_scale,
      rounded=rounded,
    )
    return router.finish(run, selection, weights), logits

  @nn.compact
  def __call__(self, run: Run, x, contract: Contract):
    c = self.config
    route, logits = self.route(run, x)
    experts = Experts(c.num_experts, c.expert_size, self.activate, name="experts")
    terms = experts(run, x, route, contract)
    shared = None
    if c.shared_size:
      shared = layers.GatedMlp(c.shared_size, self.activate, name="shared")(run, x)
    output, trace = combine_terms(run, terms, route, shared, contract)
    return output, {**route_trace(route, logits), **trace}


class DeepseekV4Block(nn.Module):
  """Hyper-connected attention and MoE: streams [B, T, n, D] → (streams, cache, trace entries)."""

  config: DeepseekV4Config
  layer: int

  @nn.compact
  def __call__(self, run: Run, streams, cache: SparseCache, rope_of, contract: Contract):
    c = self.config

    def normed(name, x):
      weight = self.param(name, nn.initializers.ones, (c.hidden_size,))
      return rms_norm_once(run, x, weight, c.rms_norm_eps)

    x, weights = HyperConnection(c, name="attention_hc")(run, streams)
    attention = SparseAttention(c, self.layer, name="attention")
    branch, cache = attention(run, normed("attention_norm", x), cache, rope_of)
    streams, _ = expand(run, streams, branch, weights)
    x, weights = HyperConnection(c, name="ffn_hc")(run, streams)
    moe = DeepseekV4Moe(c, self.layer, name="moe")
    branch, trace = moe(run, normed("ffn_norm", x), contract)
    streams, closing = expand(run, streams, branch, weights)
    streams = layers.stream_delta(run, streams, self.layer)
    return streams, cache, {**trace, "closing": closing, "post_block": streams}


class DeepseekV4(Model):
  """See the module."""

  @staticmethod
  def read_config(fields: Fields) -> DeepseekV4Config:
    return read_config(fields)

  @staticmethod
  def write_config(config: DeepseekV4Config) -> dict[str, Any]:
    return write_config(config)

  @staticmethod
  def tensors(config: DeepseekV4Config) -> list[Tensor]:
    return deepseek_v4_names.tensors(config)

  def contract(self, mode: Mode) -> Contract:
    """The release: gate before the down projection, C by ascending id, shared expert inside."""
    if mode.rounding != "reference":
      return transformers_contract(mode)
    if mode.contract == "eager":
      raise ValueError("mode: the eager contract is transformers'; DeepSeek-V4 has it with hf.")
    return Contract("DeepSeek-V4", operand="bfloat16", accumulator="float32")

  def close_block(self, mode: Mode, closing, output):
    return close(mode, closing, output)

  def layer_state(self, layer: int, batch: int, length: int, mode: Mode) -> SparseCache:
    c, ratio = self.config, self.config.ratios[layer]
    csa = c.kinds[layer] == CSA
    if mode.packed_kv and mode.packed_kv.window:
      raise ValueError("mode: DeepSeek-V4 has a window of its own; packed_kv takes none.")

    def make(width, entries):
      rows = (batch, max(1, length // ratio), width)
      return CompressorState.empty(entries(mode, rows), batch, ratio, csa, width)

    plain = lambda mode, shape: jnp.zeros(shape, mode.dtype)
    return SparseCache(
      window=empty(mode, (batch, c.window, c.head_dim)),
      compressor=make(c.head_dim, empty) if ratio else None,
      indexer=make(c.index_dim, plain) if csa else None,
      ratio=ratio,
    )

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
    table = self.param("embed", layers.embedding_init, (c.vocab_size, c.hidden_size))

    def block(layer, run, streams, cache):
      rope_of = lambda positions: layers.rope_at(c.frequencies(layer), run.length, positions)
      module = DeepseekV4Block(c, layer, name=f"layers_{layer}")
      return module(run, streams, cache, rope_of, contract)

    x = layers.embed(run, table)[:, :, None]
    streams = jnp.broadcast_to(x, (*x.shape[:2], c.hc_mult, c.hidden_size))
    streams, state, trace = self.run_blocks(run, streams, state, block)
    x = HyperHead(c, name="hc_head")(run, layers.logit_tokens(run, streams))
    norm = self.param("norm", nn.initializers.ones, (c.hidden_size,))
    x = rms_norm_once(run, x, norm, c.rms_norm_eps)
    head = None
    if not c.tie_embeddings:
      head = self.param("head", layers.projection_init, (c.hidden_size, c.vocab_size))
    logits = layers.lm_logits(run, x, table, head)
    # The release has FP32 logits.
    return (run.ops.round(logits) if mode.rounding == "hf" else logits), state, trace
