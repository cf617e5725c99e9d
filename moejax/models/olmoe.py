"""OLMoE (Muennighoff et al., 2024): QK-norm over whole projections, no shared expert, no bias."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from moejax.combine import Contract
from moejax.models import llama_names as names
from moejax.models.attention import Attention
from moejax.models.config import common_fields, Config, Fields
from moejax.models.decoder import Decoder
from moejax.models.execution import Mode
from moejax.models.moe import transformers_contract
from moejax.models.run import Run
from moejax.models.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class OlmoeConfig(Config):
  """Adds `clip_qkv`, the bound of queries, keys and values, or None."""

  clip_qkv: float | None = None


class OlmoeAttention(Attention):
  """Norm over all channels of q and k, then the clip, then heads."""

  def project(self, run: Run, x):
    q, k, v = self.projections(run, x)
    q, k = self.norm(run, "q_norm", q), self.norm(run, "k_norm", k)
    bound = self.config.clip_qkv
    if bound is not None:
      bound = run.ops.round(jnp.float32(bound))
      q, k, v = (jnp.clip(t, -bound, bound) for t in (q, k, v))
    return self.split(q), self.split(k), self.split(v)


class Olmoe(Decoder):
  """See the module."""

  attention = OlmoeAttention

  @staticmethod
  def read_config(fields: Fields) -> OlmoeConfig:
    fields.refuse("attention_bias", False)
    common = fields.common()
    return OlmoeConfig(
      family="olmoe",
      **common,
      num_experts=fields.get("num_experts", "num_local_experts"),
      expert_size=fields.get("intermediate_size"),
      shared_size=0,
      norm_topk_prob=fields.get("norm_topk_prob", default=False),
      moe_layers=tuple(range(common["num_layers"])),
      rope_theta=fields.plain_rope_theta(),
      clip_qkv=fields.get("clip_qkv", default=None),
    )

  @staticmethod
  def write_config(config: OlmoeConfig) -> dict[str, Any]:
    return common_fields(config) | dict(
      architectures=["OlmoeForCausalLM"],
      model_type="olmoe",
      num_experts=config.num_experts,
      intermediate_size=config.expert_size,
      norm_topk_prob=config.norm_topk_prob,
      rope_theta=config.rope_theta,
      clip_qkv=config.clip_qkv,
      attention_bias=False,
    )

  @staticmethod
  def tensors(config: OlmoeConfig) -> list[Tensor]:
    out, c = names.embedding_and_head(config), config.head_dim
    for layer in range(config.num_layers):
      out += names.block(config, layer)
      out += names.qk_norms(layer, config.num_heads * c, config.num_kv_heads * c)
      out += names.ffn(config, layer)
    return out

  def contract(self, mode: Mode) -> Contract:
    return transformers_contract(mode)
