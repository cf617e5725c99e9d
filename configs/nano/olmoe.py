"""olmoe-nano: OLMoE's architecture with 10 layers, 32 experts, top-8.

python -m experiments.train_nano --family=olmoe --corpus=DIR --out=out/olmoe-nano
"""

from configs.nano.nano import COMMON, Nano
from moejax.training import Recipe


def get() -> Nano:
  fields = COMMON | dict(
    model_type="olmoe",
    intermediate_size=32,
    num_hidden_layers=10,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts=32,
    num_experts_per_tok=8,
    norm_topk_prob=False,
    rms_norm_eps=1e-5,
  )
  # 13 million tokens with a repetition_loss of 2, which only set in at step 3,000; then, from that
  # checkpoint, two million with 5, and the last two million with 10.
  recipe = Recipe(tokens=17_000_000, repetition_loss=10.0, repetition_from=0.4726)
  return Nano("olmoe-nano", fields, recipe)
