"""qwen3-nano: Qwen3-MoE's architecture with 8 layers, 32 experts, top-8, grouped-query attention.

    python -m experiments.train_nano --family=qwen3_moe --corpus=DIR --out=out/qwen3-nano

Four query heads share two key-value heads; a head is wider than the hidden size over the heads.
"""

from configs.nano.nano import COMMON, Nano
from moejax.training import Recipe


def get() -> Nano:
  fields = COMMON | dict(
    model_type="qwen3_moe",
    intermediate_size=32,
    moe_intermediate_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    num_experts=32,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
  )
  return Nano("qwen3-nano", fields, Recipe(tokens=10_100_000, repetition_loss=5.0))
