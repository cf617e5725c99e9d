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
    rope_theta=10000.0,
  )
  # The price of repetition was introduced at step 3,000 of this training, and was that of every
  # earlier successor of the two tokens, not only of the last one.
  return Nano("olmoe-nano", fields, Recipe(tokens=13_000_000, repetition_from=0.4726))
