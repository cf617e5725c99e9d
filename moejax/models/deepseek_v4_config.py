"""DeepSeek-V4's configuration: the release's spelling and transformers', and YaRN."""

import dataclasses
import math
from typing import Any

import numpy as np

from moejax.models.config import common_fields, Config, Fields
from moejax.numerics import inverse_frequencies

WINDOW = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
_KIND_OF_RATIO = {0: WINDOW, 4: CSA, 128: HCA}


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN scaling of rotary frequencies (Peng et al., 2023), without its attention factor."""

  factor: float
  original: int
  beta_fast: float
  beta_slow: float

  def scale(self, frequencies: np.ndarray, dim: int, theta: float) -> np.ndarray:
    """float32 [dim / 2]: interpolated where a turn is long, as they were where it is short."""

    def turns(n):
      return dim * math.log(self.original / (n * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turns(self.beta_fast)), 0)
    high = min(math.ceil(turns(self.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    exact = frequencies.astype(np.float64)
    return (exact / self.factor * ramp + exact * (1 - ramp)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config(Config):
  """Adds to `Config`; kinds and ratios are per layer, a ratio of 0 is a window-only layer."""

  rope_dim: int = 64
  q_rank: int = 1024
  o_groups: int = 8
  o_rank: int = 1024
  window: int = 128
  kinds: tuple[str, ...] = ()
  ratios: tuple[int, ...] = ()
  hash_layers: tuple[int, ...] = ()
  routed_scale: float = 1.5
  swiglu_limit: float = 10.0
  hc_mult: int = 4
  hc_iterations: int = 20
  hc_eps: float = 1e-6
  index_heads: int = 64
  index_dim: int = 128
  index_topk: int = 512
  compress_theta: float = 160000.0
  yarn: Yarn | None = None

  has_activation_quantization = True

  @property
  def state_shape(self) -> tuple[int, ...]:
    return (self.hc_mult, self.hidden_size)

  def frequencies(self, layer: int) -> np.ndarray:
    """Rotary frequencies float32 [rope_dim / 2]; compressed layers have a base of their own."""
    if self.kinds[layer] == WINDOW:
      return inverse_frequencies(self.rope_dim, self.rope_theta)
    plain = inverse_frequencies(self.rope_dim, self.compress_theta)
    return self.yarn.scale(plain, self.rope_dim, self.compress_theta) if self.yarn else plain


def read_config(fields: Fields) -> DeepseekV4Config:
  """Both spellings: the release's (compress_ratios, num_hash_layers, ...) and transformers'."""
  fields.refuse("scoring_func", "sqrtsoftplus")
  common = fields.common()
  n = common["num_layers"]
  kinds, ratios = _kinds(fields, n)
  main, compress = _rope(fields)
  head_dim = common["head_dim"]
  partial = main.get("partial_rotary_factor", fields.get("partial_rotary_factor", default=None))
  rope_dim = int(head_dim * partial) if partial else fields.get("qk_rope_head_dim")
  mlp_kinds = fields.get("mlp_layer_types", default=None)
  num_hash = fields.get("num_hash_layers", default=3)
  hashed = (
    range(num_hash)
    if mlp_kinds is None
    else [i for i, kind in enumerate(mlp_kinds) if kind == "hash_moe"]
  )
  width = fields.get("moe_intermediate_size")
  return DeepseekV4Config(
    family="deepseek_v4",
    **common,
    num_experts=fields.get("n_routed_experts", "num_local_experts"),
    expert_size=width,
    shared_size=fields.get("n_shared_experts", default=1) * width,
    norm_topk_prob=fields.get("norm_topk_prob", default=True),
    moe_layers=tuple(range(n)),
    rope_theta=float(main["rope_theta"]),
    rope_dim=rope_dim,
    q_rank=fields.get("q_lora_rank"),
    o_groups=fields.get("o_groups"),
    o_rank=fields.get("o_lora_rank"),
    window=fields.get("sliding_window"),
    kinds=kinds,
    ratios=ratios,
    hash_layers=tuple(i for i in hashed if i < n),
    routed_scale=float(fields.get("routed_scaling_factor")),
    swiglu_limit=float(fields.get("swiglu_limit")),
    hc_mult=fields.get("hc_mult"),
    hc_iterations=fields.get("hc_sinkhorn_iters"),
    hc_eps=float(fields.get("hc_eps")),
    index_heads=fields.get("index_n_heads"),
    index_dim=fields.get("index_head_dim"),
    index_topk=fields.get("index_topk"),
    compress_theta=float(compress["rope_theta"]),
    yarn=_yarn(compress),
  )


def _kinds(fields: Fields, num_layers: int):
  """(kind, ratio) of every layer; a list may go on with the prediction block's."""
  kinds = fields.get("layer_types", default=None)
  if kinds is None:
    ratios = fields.get("compress_ratios", "layer_types")
    unknown = set(ratios) - set(_KIND_OF_RATIO)
    if unknown:
      raise ValueError(f"config.json: compress_ratios must be 0, 4 or 128, got {min(unknown)}.")
    kinds = [_KIND_OF_RATIO[r] for r in ratios]
  if len(kinds) < num_layers:
    raise ValueError(f"config.json: {len(kinds)} layer types for {num_layers} layers.")
  unknown = set(kinds) - set(_KIND_OF_RATIO.values())
  if unknown:
    raise ValueError(f"config.json: unknown layer type {min(unknown)!r}.")
  rates = {CSA: 4, HCA: 128, **fields.get("compress_rates", default={}), WINDOW: 0}
  kinds = tuple(kinds[:num_layers])
  return kinds, tuple(rates[kind] for kind in kinds)


def _rope(fields: Fields):
  """Rotary parameters of window layers and of compressed ones."""
  given = fields.get("rope_parameters", "rope_scaling", default={})
  if "main" in given:
    return given["main"], given["compress"]
  main = {"rope_type": "default", "rope_theta": fields.get("rope_theta", default=10000.0)}
  return main, {**given, "rope_theta": fields.get("compress_rope_theta", default=160000.0)}


def _yarn(rope: dict[str, Any]) -> Yarn | None:
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind != "yarn":
    raise ValueError(f"config.json: rope_type {kind!r} is not supported, expected yarn.")
  return Yarn(
    float(rope["factor"]),
    int(rope["original_max_position_embeddings"]),
    float(rope.get("beta_fast", 32)),
    float(rope.get("beta_slow", 1)),
  )


def write_config(config: DeepseekV4Config) -> dict[str, Any]:
  """In transformers' spelling, which admits every compression ratio."""
  partial = config.rope_dim / config.head_dim
  compress = {"rope_type": "default", "rope_theta": config.compress_theta}
  if config.yarn:
    y = config.yarn
    compress |= dict(
      rope_type="yarn",
      factor=y.factor,
      original_max_position_embeddings=y.original,
      beta_fast=y.beta_fast,
      beta_slow=y.beta_slow,
      attention_factor=1.0,
    )
  main = {"rope_type": "default", "rope_theta": config.rope_theta}
  rates = {kind: ratio for kind, ratio in zip(config.kinds, config.ratios) if ratio}
  hashed = ["hash_moe" if i in config.hash_layers else "moe" for i in range(config.num_layers)]
  return common_fields(config) | dict(
    architectures=["DeepseekV4ForCausalLM"],
    model_type="deepseek_v4",
    n_routed_experts=config.num_experts,
    n_shared_experts=config.shared_size // config.expert_size,
    moe_intermediate_size=config.expert_size,
    norm_topk_prob=config.norm_topk_prob,
    layer_types=list(config.kinds),
    compress_rates={CSA: 4, HCA: 128} | rates,
    mlp_layer_types=hashed,
    partial_rotary_factor=partial,
    rope_parameters={
      "main": main | {"partial_rotary_factor": partial},
      "compress": compress | {"partial_rotary_factor": partial},
    },
    scoring_func="sqrtsoftplus",
    q_lora_rank=config.q_rank,
    o_groups=config.o_groups,
    o_lora_rank=config.o_rank,
    sliding_window=config.window,
    routed_scaling_factor=config.routed_scale,
    swiglu_limit=config.swiglu_limit,
    hc_mult=config.hc_mult,
    hc_sinkhorn_iters=config.hc_iterations,
    hc_eps=config.hc_eps,
    index_n_heads=config.index_heads,
    index_head_dim=config.index_dim,
    index_topk=config.index_topk,
    num_nextn_predict_layers=0,
  )
