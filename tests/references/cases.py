"""Tiny models of every family, as published config.json files, and what was recorded of them.

Together the cases of a family visit every variant of heads, norms, gates and ties that its code
has. Weights are made from the seed (`weights`), so that only outputs are kept in `data/`; the seeds
are such that no decision in float32 is close (`live.LIMITS`).
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Case:
  """One tiny checkpoint and the tokens it reads.

  Attributes:
    name: of the case and its file.
    config: config.json.
    seed: of weights and tokens.
    batch, length: B and T of the tokens.
    prompt: P, how many tokens are prefilled before single-token decoding, and the greedy prompt.
    new: N, greedy tokens after the prompt.
    text: if given, the tokens are its UTF-8 bytes, and the checkpoint has a byte-level tokenizer.
  """

  name: str
  config: dict[str, Any]
  seed: int
  batch: int = 2
  length: int = 29
  prompt: int = 11
  new: int = 12
  text: str | None = None

  @property
  def family(self) -> str:
    return self.config["model_type"]


def reference(name: str) -> dict[str, np.ndarray]:
  """The recorded arrays of a case, from transformers in float32 with eager attention and experts.

  L layers, Lm of them with experts, E experts, K selected, V vocabulary, D hidden size:

    tokens          int32 [B, T]
    moe_layers      int32 [Lm], which layers have experts; leading axis of the six entries below
    router_logits   float32 [Lm, B, T, E]
    ids             int32 [Lm, B, T, K], ascending
    weights         float32 [Lm, B, T, K], gates in the order of ids
    margins         float32 [Lm, B, T], weakest selected minus strongest unselected logit
                    (DeepSeek-V4: biased score); NaN where a table decides
    ties            bool [Lm, B, T], whether the last selected and first unselected score are equal
    post_block      float32 [B, T, D] or [B, T, hc, D], after the last layer, before the final norm
    logits          float32 [B, T, V] of one pass over all tokens
    nll             float32 [B, T-1] of tokens[:, 1:]
    decode_logits   float32 [B, T-P, V] at positions P .. T-1, P tokens prefilled, then one by one
    greedy_ids      int32 [B, N] after the first P tokens
    greedy_margins  float32 [B, N], best minus second best logit
    index_ids       int32 [Lc, B, T, k], DeepSeek-V4 only: entries that the indexers of the Lc CSA
                    layers pick, ascending; -1 is none
    weights_sha256  uint8 [32], `weights.digest` of the checkpoint that was run
  """
  with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
    return dict(file)


_EVERY = dict(
  attention_dropout=0.0,
  hidden_act="silu",
  hidden_size=32,
  initializer_range=0.02,
  max_position_embeddings=256,
  num_attention_heads=4,
  num_hidden_layers=3,
  tie_word_embeddings=False,
  torch_dtype="bfloat16",
  use_cache=True,
  vocab_size=89,
)

OLMOE = dict(
  _EVERY,
  architectures=["OlmoeForCausalLM"],
  attention_bias=False,
  clip_qkv=None,
  eos_token_id=88,
  intermediate_size=24,
  model_type="olmoe",
  norm_topk_prob=False,
  num_experts=13,
  num_experts_per_tok=5,
  num_key_value_heads=4,
  output_router_logits=False,
  pad_token_id=1,
  rms_norm_eps=1e-5,
  rope_scaling=None,
  rope_theta=10000.0,
  router_aux_loss_coef=0.01,
)

QWEN2_MOE = dict(
  _EVERY,
  architectures=["Qwen2MoeForCausalLM"],
  bos_token_id=87,
  decoder_sparse_step=1,
  eos_token_id=87,
  intermediate_size=56,
  max_window_layers=2,
  model_type="qwen2_moe",
  moe_intermediate_size=24,
  norm_topk_prob=False,
  num_experts=11,
  num_experts_per_tok=4,
  num_key_value_heads=4,
  output_router_logits=False,
  rms_norm_eps=1e-6,
  rope_theta=1000000.0,
  router_aux_loss_coef=0.001,
  shared_expert_intermediate_size=40,
  sliding_window=128,
  use_sliding_window=False,
)

QWEN3_MOE = dict(
  _EVERY,
  architectures=["Qwen3MoeForCausalLM"],
  attention_bias=False,
  bos_token_id=86,
  decoder_sparse_step=1,
  eos_token_id=87,
  head_dim=12,  # not hidden_size / num_attention_heads
  intermediate_size=56,
  max_window_layers=3,
  mlp_only_layers=[],
  model_type="qwen3_moe",
  moe_intermediate_size=24,
  norm_topk_prob=True,
  num_experts=13,
  num_experts_per_tok=5,
  num_key_value_heads=2,
  output_router_logits=False,
  rms_norm_eps=1e-6,
  rope_scaling=None,
  rope_theta=1000000.0,
  router_aux_loss_coef=0.001,
  sliding_window=None,
  use_sliding_window=False,
)

MIXTRAL = dict(
  _EVERY,
  architectures=["MixtralForCausalLM"],
  bos_token_id=1,
  eos_token_id=2,
  intermediate_size=40,
  model_type="mixtral",
  num_experts_per_tok=2,
  num_key_value_heads=2,
  num_local_experts=7,
  output_router_logits=False,
  rms_norm_eps=1e-5,
  rope_theta=1000000.0,
  router_aux_loss_coef=0.02,
  sliding_window=None,
)

DEEPSEEK = dict(
  _EVERY,
  architectures=["DeepseekForCausalLM"],
  attention_bias=False,
  aux_loss_alpha=0.001,
  bos_token_id=86,
  eos_token_id=87,
  first_k_dense_replace=1,
  intermediate_size=56,
  model_type="deepseek",
  moe_intermediate_size=24,
  moe_layer_freq=1,
  n_routed_experts=13,
  n_shared_experts=2,
  norm_topk_prob=False,
  num_experts_per_tok=5,
  num_key_value_heads=4,
  pretraining_tp=1,
  rms_norm_eps=1e-6,
  rope_scaling=None,
  rope_theta=10000.0,
  scoring_func="softmax",
  seq_aux=True,
)

# The fields that every DeepSeek-V4 file has in the same spelling.
_DEEPSEEK_V4 = dict(
  _EVERY,
  architectures=["DeepseekV4ForCausalLM"],
  attention_bias=False,
  bos_token_id=0,
  compress_rope_theta=160000.0,
  eos_token_id=1,
  hc_eps=1e-6,
  hc_mult=4,
  hc_sinkhorn_iters=20,
  head_dim=32,
  index_head_dim=16,
  index_n_heads=16,  # with few, scores of exactly zero tie
  index_topk=3,
  max_position_embeddings=8192,
  model_type="deepseek_v4",
  moe_intermediate_size=32,
  n_routed_experts=16,
  n_shared_experts=1,
  norm_topk_prob=True,
  num_experts_per_tok=6,
  num_key_value_heads=1,
  o_groups=2,
  o_lora_rank=8,
  q_lora_rank=16,
  rms_norm_eps=1e-6,
  rope_theta=10000.0,
  routed_scaling_factor=1.5,
  scoring_func="sqrtsoftplus",
  sliding_window=8,
  swiglu_limit=10.0,
  vocab_size=64,
)

# As published; but ratios other than 0, 4 and 128 have names in the files of transformers only.
DEEPSEEK_V4 = dict(
  _DEEPSEEK_V4,
  compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
  hidden_size=64,
  layer_types=["sliding_attention"] * 2
  + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
  num_hash_layers=3,
  num_hidden_layers=6,
  num_nextn_predict_layers=0,
  qk_rope_head_dim=8,
  rope_scaling=dict(
    type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=512
  ),
  swiglu_limit=0.75,  # small enough to clamp
  topk_method="noaux_tc",
)

# Every field in the spelling of transformers, and constants that no code should know by heart.
DEEPSEEK_V4_KEEP_ALL = dict(
  _DEEPSEEK_V4,
  compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
  hc_eps=1e-3,
  hc_sinkhorn_iters=3,
  index_topk=64,
  layer_types=["sliding_attention"] * 2
  + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
  mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 3,
  num_hidden_layers=6,
  num_nextn_predict_layers=0,
  partial_rotary_factor=0.25,
  rms_norm_eps=1e-3,
  rope_parameters=dict(
    main=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    compress=dict(rope_type="default", rope_theta=160000.0, partial_rotary_factor=0.25),
  ),
  routed_scaling_factor=2.5,
)

# Every field as published. The last ratio, and tensors named mtp, belong to a layer not used here.
DEEPSEEK_V4_PUBLISHED = dict(
  _DEEPSEEK_V4,
  compress_ratios=[0, 4, 128, 4, 0],
  hc_mult=2,
  num_hash_layers=2,
  num_hidden_layers=4,
  num_nextn_predict_layers=1,
  qk_rope_head_dim=8,
  rope_scaling=dict(
    type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=512
  ),
  topk_method="noaux_tc",
)

# The spelling of transformers 5 for the fields that it renamed.
_RENAMED = dict(
  dtype="bfloat16",
  rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
)


def _renamed(config):
  old = ("torch_dtype", "rope_theta", "rope_scaling")
  return {k: v for k, v in config.items() if k not in old} | _RENAMED


_NORM = dict(norm_topk_prob=True)
_GQA = dict(num_key_value_heads=2)
_TIED = dict(tie_word_embeddings=True)
_EPS = dict(rms_norm_eps=1e-3)  # of no release, and large enough to be missed
_BYTES = dict(vocab_size=320, eos_token_id=257, pad_token_id=258)
_TEXT = "Which expert answers depends on who is asked first."

_ALL = (
  Case("olmoe_base", OLMOE, seed=0),
  Case("olmoe_norm", OLMOE | _NORM | _EPS, seed=2),
  Case("olmoe_clip", OLMOE | dict(clip_qkv=0.8), seed=0),
  Case("olmoe_gqa", OLMOE | _GQA, seed=1),
  Case("olmoe_tied", OLMOE | _TIED, seed=0),
  Case("olmoe_text", OLMOE | _BYTES | dict(num_hidden_layers=2), seed=0, text=_TEXT),
  Case("qwen2_moe_base", QWEN2_MOE, seed=0),
  Case("qwen2_moe_norm", QWEN2_MOE | _NORM | _EPS, seed=0),
  Case("qwen2_moe_gqa", QWEN2_MOE | _GQA, seed=0),
  Case("qwen2_moe_dense", QWEN2_MOE | dict(mlp_only_layers=[1]), seed=0),
  Case("qwen2_moe_step", QWEN2_MOE | dict(decoder_sparse_step=2, num_hidden_layers=4), seed=0),
  Case("qwen3_moe_base", QWEN3_MOE, seed=0),
  Case("qwen3_moe_unnormed", _renamed(QWEN3_MOE) | dict(norm_topk_prob=False), seed=0),
  Case("qwen3_moe_dense", QWEN3_MOE | _EPS | dict(mlp_only_layers=[0]), seed=1),
  Case("mixtral_base", MIXTRAL, seed=0),
  Case("mixtral_tied", MIXTRAL | _TIED | _EPS, seed=0),
  Case("deepseek_base", DEEPSEEK, seed=1),
  Case("deepseek_norm", DEEPSEEK | _NORM | _GQA | _EPS, seed=0),
  Case("deepseek_unshared", DEEPSEEK | dict(n_shared_experts=None), seed=0),
  Case("deepseek_freq", DEEPSEEK | dict(moe_layer_freq=2, num_hidden_layers=4), seed=0),
  Case("deepseek_v4_base", DEEPSEEK_V4, seed=8, length=37, prompt=13),
  Case("deepseek_v4_keep_all", DEEPSEEK_V4_KEEP_ALL, seed=8, length=37, prompt=13),
  Case("deepseek_v4_published", DEEPSEEK_V4_PUBLISHED, seed=151, batch=1, length=133, prompt=125),
)
CASES = {case.name: case for case in _ALL}
