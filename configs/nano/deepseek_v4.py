"""dsv4-nano: DeepSeek-V4's architecture with 12 layers, 32 experts, top-6 and one shared.

    python -m experiments.train_nano --family=deepseek_v4 --corpus=DIR --out=out/dsv4-nano

Two window layers, then compressed attention, CSA (ratio 4) and HCA (16) alternating. The indexer
keeps 64 entries of CSA, all there are at 256 tokens: it is inert up to that length.
"""

from configs.nano.nano import COMMON, Nano
from moejax.training import Recipe

_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def get() -> Nano:
  rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
  fields = COMMON | dict(
    model_type="deepseek_v4",
    moe_intermediate_size=32,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=64,
    partial_rotary_factor=0.25,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=64,
    sliding_window=64,
    layer_types=["sliding_attention"] * 2 + [_CSA, _HCA] * 5,
    compress_rates={_CSA: 4, _HCA: 16},
    rope_parameters={"main": rope, "compress": rope},
    index_n_heads=16,
    index_head_dim=16,
    index_topk=64,
    n_routed_experts=32,
    n_shared_experts=1,
    num_experts_per_tok=6,
    norm_topk_prob=True,
    scoring_func="sqrtsoftplus",
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 9,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
  )
  # At 1e-3 the experts behind a learned router starve for the first half million tokens.
  recipe = Recipe(tokens=12_300_000, bias_rate=3e-3, repetition_loss=5.0)
  return Nano("dsv4-nano", fields, recipe)
