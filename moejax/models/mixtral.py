"""Mixtral (Jiang et al., 2024): top-2 of few experts, weights always normalised, float32 gates."""

from typing import Any

from moejax.combine import Contract
from moejax.models import llama_names as names
from moejax.models.config import common_fields, Config, Fields
from moejax.models.decoder import Decoder
from moejax.models.execution import Mode
from moejax.models.tensors import experts, matrix, Tensor

_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


class Mixtral(Decoder):
  """See the module."""

  @staticmethod
  def read_config(fields: Fields) -> Config:
    common = fields.common()
    fields.refuse("sliding_window", common["max_positions"])
    return Config(
      family="mixtral",
      **common,
      num_experts=fields.get("num_local_experts", "num_experts"),
      expert_size=fields.get("intermediate_size"),
      shared_size=0,
      norm_topk_prob=True,
      moe_layers=tuple(range(common["num_layers"])),
      rope_theta=fields.plain_rope_theta(1e6),
    )

  @staticmethod
  def write_config(config: Config) -> dict[str, Any]:
    return common_fields(config) | dict(
      architectures=["MixtralForCausalLM"],
      model_type="mixtral",
      num_local_experts=config.num_experts,
      intermediate_size=config.expert_size,
      rope_theta=config.rope_theta,
      sliding_window=None,
    )

  @staticmethod
  def tensors(config: Config) -> list[Tensor]:
    out, d = names.embedding_and_head(config), config.hidden_size
    for layer in range(config.num_layers):
      path, old = (f"layers_{layer}", "moe"), f"model.layers.{layer}.block_sparse_moe."
      new = f"model.layers.{layer}.mlp."
      name = lambda e, part, old=old: (f"{old}experts.{e}.{_PROJECTIONS[part]}.weight",)
      fused = ((new + "experts.gate_up_proj",), (new + "experts.down_proj",))
      out += names.block(config, layer)
      router = (old + "gate.weight", new + "gate.weight")
      out.append(matrix((*path, "router"), (d, config.num_experts), *router))
      sizes = (config.num_experts, d, config.expert_size)
      out += experts((*path, "experts"), *sizes, name, fused)
    return out

  def contract(self, mode: Mode) -> Contract:
    """transformers 5: P32 over slots; its eager loop rounds terms and sum to BF16 by id."""
    eager = mode.contract == "eager"
    dtype = "bfloat16" if eager else "float32"
    return Contract(
      "transformers Mixtral eager" if eager else "transformers Mixtral",
      operand=dtype,
      accumulator=dtype,
      gate_point="after_down",
      gate_dtype="float32",
      order="ascending_id" if eager else "slot",
      shared_merge="rounded",
    )
