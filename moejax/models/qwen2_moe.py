"""Qwen1.5-MoE (Qwen2MoE in transformers): biased q, k and v, one sigmoid-gated shared expert."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from moejax.combine import Contract
from moejax.models import llama_names as names
from moejax.models import qwen_fields
from moejax.models.attention import Attention
from moejax.models.config import Config, Fields
from moejax.models.decoder import Decoder, SparseMoe
from moejax.models.execution import Mode
from moejax.models.layers import GatedMlp, projection_init
from moejax.models.moe import transformers_contract
from moejax.models.run import Run
from moejax.models.tensors import matrix, Tensor


@dataclasses.dataclass(frozen=True)
class Qwen2MoeConfig(Config):
  """Adds `qkv_bias`; published files leave it out and mean true."""

  qkv_bias: bool = True


class BiasedAttention(Attention):
  """Bias on q, k and v if the config says so."""

  @property
  def has_bias(self) -> bool:
    return self.config.qkv_bias


class GatedSharedMoe(SparseMoe):
  """Shared expert R(R(sigmoid(R(x w))) · shared): rounded before the merge."""

  def shared(self, run: Run, x):
    r = run.ops.round
    output = GatedMlp(self.config.shared_size, name="shared")(run, x)
    gate = self.param("shared_gate", projection_init, (x.shape[-1], 1))
    gate = r(run.ops.sigmoid(r(run.ops.matmul(run.quantize(x), gate))))
    return r(jnp.broadcast_to(gate, output.shape) * output)


class Qwen2Moe(Decoder):
  """See the module."""

  attention = BiasedAttention
  moe = GatedSharedMoe

  @staticmethod
  def read_config(fields: Fields) -> Qwen2MoeConfig:
    return Qwen2MoeConfig(
      **qwen_fields.read(fields, "qwen2_moe"),
      shared_size=fields.get("shared_expert_intermediate_size"),
      qkv_bias=fields.get("qkv_bias", default=True),
    )

  @staticmethod
  def write_config(config: Qwen2MoeConfig) -> dict[str, Any]:
    return qwen_fields.write(config) | dict(
      architectures=["Qwen2MoeForCausalLM"],
      model_type="qwen2_moe",
      shared_expert_intermediate_size=config.shared_size,
      qkv_bias=config.qkv_bias,
    )

  @staticmethod
  def tensors(config: Qwen2MoeConfig) -> list[Tensor]:
    out, d = names.embedding_and_head(config), config.hidden_size
    for layer in range(config.num_layers):
      out += names.block(config, layer, bias=config.qkv_bias) + names.ffn(config, layer)
      if layer in config.moe_layers:
        path, stem = (f"layers_{layer}", "moe"), f"model.layers.{layer}.mlp."
        out += names.mlp((*path, "shared"), d, config.shared_size, stem + "shared_expert.")
        out.append(matrix((*path, "shared_gate"), (d, 1), stem + "shared_expert_gate.weight"))
    return out

  def contract(self, mode: Mode) -> Contract:
    return transformers_contract(mode)
