"""Qwen3-MoE: QK-norm per head, a head width of its own, grouped keys, no shared expert, no bias."""

from typing import Any

from moejax.combine import Contract
from moejax.models import llama_names as names
from moejax.models import qwen_fields
from moejax.models.attention import Attention
from moejax.models.config import Config, Fields
from moejax.models.decoder import Decoder
from moejax.models.execution import Mode
from moejax.models.moe import transformers_contract
from moejax.models.run import Run
from moejax.models.tensors import Tensor


class HeadNormAttention(Attention):
  """Norm over the channels of each head of q and k, one weight for all heads."""

  def project(self, run: Run, x):
    q, k, v = map(self.split, self.projections(run, x))
    return self.norm(run, "q_norm", q), self.norm(run, "k_norm", k), v


class Qwen3Moe(Decoder):
  """See the module."""

  attention = HeadNormAttention

  @staticmethod
  def read_config(fields: Fields) -> Config:
    fields.refuse("attention_bias", False)
    return Config(**qwen_fields.read(fields, "qwen3_moe"), shared_size=0)

  @staticmethod
  def write_config(config: Config) -> dict[str, Any]:
    return qwen_fields.write(config) | dict(
      architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False
    )

  @staticmethod
  def tensors(config: Config) -> list[Tensor]:
    out, c = names.embedding_and_head(config), config.head_dim
    for layer in range(config.num_layers):
      out += names.block(config, layer) + names.qk_norms(layer, c, c) + names.ffn(config, layer)
    return out

  def contract(self, mode: Mode) -> Contract:
    return transformers_contract(mode)
