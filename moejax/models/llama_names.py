"""Checkpoint names of Llama-style decoders, as OLMoE, Qwen, DeepSeek-MoE and Mixtral have them."""

from moejax.models.config import Config
from moejax.models.tensors import experts, gated, matrix, Tensor, vector

_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def embedding_and_head(config: Config) -> list[Tensor]:
  """Token embedding, final norm and, unless tied, the LM head."""
  v, d = config.vocab_size, config.hidden_size
  out = [
    vector(("embed",), (v, d), "model.embed_tokens.weight"),
    vector(("norm",), (d,), "model.norm.weight"),
  ]
  return out if config.tie_embeddings else [*out, matrix(("head",), (d, v), "lm_head.weight")]


def block(config: Config, layer: int, *, bias: bool = False) -> list[Tensor]:
  """Norms and attention projections of one layer; `bias` on q, k and v."""
  d, c = config.hidden_size, config.head_dim
  path, prefix = (f"layers_{layer}",), f"model.layers.{layer}."
  widths = dict(q=config.num_heads * c, k=config.num_kv_heads * c, v=config.num_kv_heads * c)
  out = [
    vector((*path, "attention_norm"), (d,), prefix + "input_layernorm.weight"),
    vector((*path, "ffn_norm"), (d,), prefix + "post_attention_layernorm.weight"),
    matrix((*path, "attention", "o"), (widths["q"], d), prefix + "self_attn.o_proj.weight"),
  ]
  for name, width in widths.items():
    stem = f"{prefix}self_attn.{name}_proj."
    out.append(matrix((*path, "attention", name), (d, width), stem + "weight"))
    if bias:
      out.append(vector((*path, "attention", f"{name}_bias"), (width,), stem + "bias"))
  return out


def qk_norms(layer: int, q_width: int, k_width: int) -> list[Tensor]:
  """Weights of the norms on queries and keys."""
  stem = f"model.layers.{layer}.self_attn."
  return [
    vector((f"layers_{layer}", "attention", f"{name}_norm"), (width,), f"{stem}{name}_norm.weight")
    for name, width in (("q", q_width), ("k", k_width))
  ]


def mlp(path: tuple[str, ...], width: int, inner: int, stem: str) -> list[Tensor]:
  """A gated MLP named `stem`gate_proj.weight and so on."""
  return gated(path, width, inner, *((f"{stem}{p}.weight",) for p in _PROJECTIONS.values()))


def moe(config: Config, layer: int) -> list[Tensor]:
  """Router and routed experts of one layer, one tensor per expert and projection or fused."""
  d, path, stem = config.hidden_size, (f"layers_{layer}", "moe"), f"model.layers.{layer}.mlp."
  names = lambda e, part: (f"{stem}experts.{e}.{_PROJECTIONS[part]}.weight",)
  fused = ((stem + "experts.gate_up_proj",), (stem + "experts.down_proj",))
  return [
    matrix((*path, "router"), (d, config.num_experts), stem + "gate.weight"),
    *experts((*path, "experts"), config.num_experts, d, config.expert_size, names, fused),
  ]


def dense(config: Config, layer: int) -> list[Tensor]:
  """The MLP of a dense layer."""
  path, stem = (f"layers_{layer}", "mlp"), f"model.layers.{layer}.mlp."
  return mlp(path, config.hidden_size, config.dense_size, stem)


def ffn(config: Config, layer: int) -> list[Tensor]:
  """The MoE or the dense MLP of one layer."""
  return moe(config, layer) if layer in config.moe_layers else dense(config, layer)
