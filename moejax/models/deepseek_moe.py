"""DeepSeek-MoE v1: Llama attention, dense first layers, BF16 router scores, ungated shared experts.

Rounding points and contract are those of the model's own remote code; transformers has no class for
it. The shared experts are one MLP of their summed width.
"""

import dataclasses
from typing import Any

from moejax.combine import Contract
from moejax.models import layers, router
from moejax.models import llama_names as names
from moejax.models.attention import Attention
from moejax.models.config import common_fields, Config, Fields
from moejax.models.decoder import Decoder, SparseMoe
from moejax.models.execution import Mode
from moejax.models.run import Run
from moejax.models.tensors import Tensor


def _moe_layers(num_layers: int, first: int, step: int) -> tuple[int, ...]:
  return tuple(i for i in range(num_layers) if i >= first and i % step == 0)


@dataclasses.dataclass(frozen=True)
class DeepseekMoeConfig(Config):
  """Adds the number of shared experts, whose widths add up to `shared_size`."""

  num_shared: int = 0


def _spelling(config: DeepseekMoeConfig) -> tuple[int, int]:
  """(first_k_dense_replace, moe_layer_freq) that give the config's MoE layers."""
  n = config.num_layers
  for step in range(1, n + 1):
    for first in range(n + 1):
      if _moe_layers(n, first, step) == config.moe_layers:
        return first, step
  raise ValueError("config: this pattern of dense layers has no DeepSeek-MoE spelling.")


class RootAttention(Attention):
  """Scores divided by √C."""

  divide_by_root: bool = True


class DeepseekSparseMoe(SparseMoe):
  """Softmax rounded to BF16 before selection; a shared expert without a gate."""

  def route(self, run: Run, x):
    c = self.config
    weight = self.param("router", layers.projection_init, (x.shape[-1], c.num_experts))
    logits = router.router_logits(run, x, weight, "bfloat16")
    scores = run.ops.softmax(logits)
    rounded = router.router_dtype(run, "bfloat16") == "bfloat16"
    if rounded:
      scores = run.ops.round(scores)
    selection = router.select(run, scores, logits, c.top_k)
    normalize = c.norm_topk_prob and c.top_k > 1
    weights = router.weigh(
      run, scores, selection.ids, normalize=normalize, epsilon=1e-20, rounded=rounded
    )
    return router.finish(run, selection, weights), logits

  def shared(self, run: Run, x):
    size = self.config.shared_size
    return layers.GatedMlp(size, name="shared")(run, x) if size else None


class DeepseekMoe(Decoder):
  """See the module."""

  attention = RootAttention
  moe = DeepseekSparseMoe

  @staticmethod
  def read_config(fields: Fields) -> DeepseekMoeConfig:
    fields.refuse("attention_bias", False)
    fields.refuse("scoring_func", "softmax")
    common = fields.common()
    first = fields.get("first_k_dense_replace", default=0)
    step = fields.get("moe_layer_freq", default=1)
    num_shared = fields.get("n_shared_experts", default=0)
    width = fields.get("moe_intermediate_size")
    return DeepseekMoeConfig(
      family="deepseek",
      **common,
      num_experts=fields.get("n_routed_experts"),
      expert_size=width,
      num_shared=num_shared,
      shared_size=num_shared * width,
      norm_topk_prob=fields.get("norm_topk_prob", default=False),
      moe_layers=_moe_layers(common["num_layers"], first, step),
      dense_size=fields.get("intermediate_size"),
      rope_theta=fields.plain_rope_theta(),
    )

  @staticmethod
  def write_config(config: DeepseekMoeConfig) -> dict[str, Any]:
    first, step = _spelling(config)
    return common_fields(config) | dict(
      architectures=["DeepseekForCausalLM"],
      model_type="deepseek",
      n_routed_experts=config.num_experts,
      n_shared_experts=config.num_shared or None,
      moe_intermediate_size=config.expert_size,
      intermediate_size=config.dense_size,
      norm_topk_prob=config.norm_topk_prob,
      first_k_dense_replace=first,
      moe_layer_freq=step,
      scoring_func="softmax",
      rope_theta=config.rope_theta,
      attention_bias=False,
    )

  @staticmethod
  def tensors(config: DeepseekMoeConfig) -> list[Tensor]:
    out, d = names.embedding_and_head(config), config.hidden_size
    for layer in range(config.num_layers):
      out += names.block(config, layer) + names.ffn(config, layer)
      if layer in config.moe_layers and config.shared_size:
        stem = f"model.layers.{layer}.mlp.shared_experts."
        out += names.mlp((f"layers_{layer}", "moe", "shared"), d, config.shared_size, stem)
    return out

  def contract(self, mode: Mode) -> Contract:
    """B over ascending ids, as `moe_infer` scatters; the mode's "eager" is the same."""
    return Contract(
      "DeepSeek-MoE remote code",
      operand="bfloat16",
      accumulator="bfloat16",
      gate_point="after_down",
      gate_dtype="bfloat16",
      order="ascending_id",
      shared_merge="rounded",
    )
