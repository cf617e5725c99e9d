"""Configuration records, read from a published `config.json` in either generation of spellings."""

import dataclasses
from typing import Any

_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Config:
  """What every family has. Sizes are in elements; `num_layers` counts decoder blocks."""

  family: str
  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  num_experts: int
  top_k: int
  expert_size: int  # inner width of one routed expert
  shared_size: int  # inner width of the shared expert, 0 for none
  norm_topk_prob: bool
  moe_layers: tuple[int, ...]
  rope_theta: float
  rms_norm_eps: float
  max_positions: int
  tie_embeddings: bool
  bos_id: int | None
  eos_ids: tuple[int, ...]
  dense_size: int = 0  # inner width of the MLP of a dense layer

  # Layers whose routes a table of the tokens decides (DeepSeek-V4).
  hash_layers = ()

  # Whether the family's own code simulates quantised activations (`Mode.activations` "qdq").
  has_activation_quantization = False

  @property
  def router_layers(self) -> list[int]:
    """The MoE layers where a router decides."""
    return [layer for layer in self.moe_layers if layer not in self.hash_layers]

  @property
  def state_shape(self) -> tuple[int, ...]:
    """Of a token's state between blocks."""
    return (self.hidden_size,)

  def __post_init__(self):
    for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
      if getattr(self, field) < 1:
        raise ValueError(f"config of {self.family}: {field} must be at least 1.")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"config of {self.family}: {self.num_heads} query heads are not a multiple of "
        f"{self.num_kv_heads} key-value heads."
      )
    if not 1 <= self.top_k <= self.num_experts:
      raise ValueError(
        f"config of {self.family}: top_k {self.top_k} is not within 1 .. {self.num_experts}."
      )


class Fields:
  """A config.json being read: every field under any of its names, and one sentence when missing."""

  def __init__(self, values: dict[str, Any]):
    self._values = values

  def get(self, *names: str, default=_REQUIRED):
    """The first of the names that is there and not null; else the default, if there is one."""
    for name in names:
      if self._values.get(name) is not None:
        return self._values[name]
    if default is _REQUIRED:
      raise ValueError(f"config.json: field {' or '.join(names)} is missing.")
    return default

  def refuse(self, name: str, *accepted) -> None:
    """Raises if a field has a value that this code does not compute."""
    value = self._values.get(name)
    if value is not None and value not in accepted:
      wanted = " or ".join(map(repr, accepted)) or "no value"
      raise ValueError(f"config.json: {name} = {value!r} is not supported, expected {wanted}.")

  def rope(self) -> dict[str, Any]:
    """Rotary parameters: rope_parameters, or rope_theta with rope_scaling of older files."""
    parameters = dict(self.get("rope_parameters", "rope_scaling", default={}))
    if "rope_theta" not in parameters and self._values.get("rope_theta") is not None:
      parameters["rope_theta"] = self._values["rope_theta"]
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    return parameters

  def plain_rope_theta(self, default: float = 10000.0) -> float:
    """The base of an unscaled rotary embedding; anything else is refused."""
    rope = self.rope()
    if rope["rope_type"] != "default":
      raise ValueError(f"config.json: rope_type {rope['rope_type']!r} is not supported here.")
    return float(rope.get("rope_theta", default))

  def ids(self, name: str) -> tuple[int, ...]:
    """A token id or a list of them, as a tuple."""
    value = self.get(name, default=())
    return (int(value),) if isinstance(value, int) else tuple(int(i) for i in value)

  def common(self) -> dict[str, Any]:
    """The fields that have the same names in every family's file."""
    heads = self.get("num_attention_heads")
    hidden = self.get("hidden_size")
    bos = self.ids("bos_token_id")
    return dict(
      vocab_size=self.get("vocab_size"),
      hidden_size=hidden,
      num_layers=self.get("num_hidden_layers"),
      num_heads=heads,
      num_kv_heads=self.get("num_key_value_heads", default=heads),
      head_dim=self.get("head_dim", default=hidden // heads),
      top_k=self.get("num_experts_per_tok"),
      rms_norm_eps=float(self.get("rms_norm_eps", default=1e-6)),
      max_positions=self.get("max_position_embeddings"),
      tie_embeddings=bool(self.get("tie_word_embeddings", default=False)),
      bos_id=bos[0] if bos else None,
      eos_ids=self.ids("eos_token_id"),
    )


def common_fields(config: Config) -> dict[str, Any]:
  """The inverse of `Fields.common`."""
  eos = list(config.eos_ids)
  return dict(
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    num_experts_per_tok=config.top_k,
    rms_norm_eps=config.rms_norm_eps,
    max_position_embeddings=config.max_positions,
    tie_word_embeddings=config.tie_embeddings,
    bos_token_id=config.bos_id,
    eos_token_id=eos[0] if len(eos) == 1 else eos or None,
    hidden_act="silu",
    torch_dtype="bfloat16",
  )
