"""What the two Qwen MoE families read and write alike."""

from typing import Any

from moejax.models.config import common_fields, Config, Fields


def read(fields: Fields, family: str) -> dict[str, Any]:
  """Fields of a Qwen MoE config: a layer l is MoE iff (l + 1) divides by decoder_sparse_step."""
  common = fields.common()
  step = fields.get("decoder_sparse_step", default=1)
  dense = set(fields.get("mlp_only_layers", default=()))
  every = range(common["num_layers"])
  if fields.get("use_sliding_window", default=False):
    raise ValueError(f"config.json: use_sliding_window is not supported for {family}.")
  return dict(
    family=family,
    **common,
    num_experts=fields.get("num_experts", "num_local_experts"),
    expert_size=fields.get("moe_intermediate_size"),
    norm_topk_prob=fields.get("norm_topk_prob", default=False),
    moe_layers=tuple(i for i in every if i not in dense and (i + 1) % step == 0),
    dense_size=fields.get("intermediate_size"),
    rope_theta=fields.plain_rope_theta(),
  )


def write(config: Config) -> dict[str, Any]:
  """The inverse of `read`."""
  return common_fields(config) | dict(
    num_experts=config.num_experts,
    moe_intermediate_size=config.expert_size,
    intermediate_size=config.dense_size,
    norm_topk_prob=config.norm_topk_prob,
    decoder_sparse_step=1,
    mlp_only_layers=[i for i in range(config.num_layers) if i not in config.moe_layers],
    rope_theta=config.rope_theta,
    use_sliding_window=False,
  )
