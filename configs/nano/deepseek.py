"""dsmoe-nano: DeepSeek-MoE's architecture with 8 layers, the first dense, 32 experts, top-6.

    python -m experiments.train_nano --family=deepseek --corpus=DIR --out=out/dsmoe-nano

Two shared experts without a gate; router scores are BF16, as the code released with the model.
"""

from configs.nano.nano import COMMON, Nano
from moejax.training import Recipe


def get() -> Nano:
  fields = COMMON | dict(
    model_type="deepseek",
    intermediate_size=320,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=32,
    n_shared_experts=2,
    num_experts_per_tok=6,
    norm_topk_prob=False,
    scoring_func="softmax",
    rms_norm_eps=1e-6,
  )
  return Nano("dsmoe-nano", fields, Recipe(tokens=10_100_000, repetition_loss=5.0))
