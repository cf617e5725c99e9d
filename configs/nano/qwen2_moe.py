"""qwen15-nano: Qwen1.5-MoE's architecture with 8 layers, 32 experts, top-4, a gated shared expert.

python -m experiments.train_nano --family=qwen2_moe --corpus=DIR --out=out/qwen15-nano
"""

from configs.nano.nano import COMMON, Nano
from moejax.training import Recipe


def get() -> Nano:
  fields = COMMON | dict(
    model_type="qwen2_moe",
    intermediate_size=48,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=False,
    rms_norm_eps=1e-6,
  )
  return Nano("qwen15-nano", fields, Recipe(tokens=10_100_000, repetition_loss=5.0))
