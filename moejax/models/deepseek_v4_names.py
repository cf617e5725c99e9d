"""DeepSeek-V4's parameters by the names of the release, of transformers, and of its mixed saves.

`save_pretrained` of transformers writes the release's names below "model.", but for a few.
"""

from moejax.models.deepseek_v4_config import CSA, DeepseekV4Config
from moejax.models.tensors import experts, gated, matrix, Names, Tensor, vector

_SITES = (("attention", "attn"), ("ffn", "ffn"))
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def tensors(config: DeepseekV4Config) -> list[Tensor]:
  """Every parameter of the model."""
  c, d, v, n = config, config.hidden_size, config.vocab_size, config.hc_mult
  out = [
    vector(("embed",), (v, d), "embed.weight", "model.embed_tokens.weight"),
    vector(("norm",), (d,), "norm.weight", "model.norm.weight"),
    matrix(("hc_head", "fn"), (n * d, n), *_head("fn"), dtype="float32"),
    vector(("hc_head", "base"), (n,), *_head("base"), dtype="float32"),
    vector(("hc_head", "scale"), (1,), *_head("scale"), dtype="float32"),
  ]
  if not c.tie_embeddings:
    out.append(matrix(("head",), (d, v), "head.weight", "lm_head.weight"))
  for layer in range(c.num_layers):
    out += _sites(c, layer) + _attention(c, layer) + _moe(c, layer)
  return out


def _head(part: str) -> Names:
  return f"hc_head_{part}", f"model.hc_head.hc_{part}"


def _names(layer: int, release: str, transformers: str) -> Names:
  """Alternatives for a tensor of one layer."""
  stem = f"layers.{layer}."
  return stem + release, f"model.{stem}{release}", f"model.{stem}{transformers}"


def _sites(c: DeepseekV4Config, layer: int) -> list[Tensor]:
  """Norm and hyper-connection of both sites."""
  d, n, path, out = c.hidden_size, c.hc_mult, f"layers_{layer}", []
  norms = {"attention": "input_layernorm", "ffn": "post_attention_layernorm"}
  for site, short in _SITES:
    names = _names(layer, f"{short}_norm.weight", f"{norms[site]}.weight")
    out.append(vector((path, f"{site}_norm"), (d,), *names))
    shapes = {"fn": (n * d, (2 + n) * n), "base": ((2 + n) * n,), "scale": (3,)}
    for part, shape in shapes.items():
      names = _names(layer, f"hc_{short}_{part}", f"{short}_hc.{part}")
      make = matrix if part == "fn" else vector
      out.append(make((path, f"{site}_hc", part), shape, *names, dtype="float32"))
  return out


def _attention(c: DeepseekV4Config, layer: int) -> list[Tensor]:
  d, heads, path = c.hidden_size, c.num_heads * c.head_dim, (f"layers_{layer}", "attention")
  name = lambda release, transformers: _names(layer, f"attn.{release}", f"self_attn.{transformers}")
  kv_norm = (*name("kv_norm.weight", "kv_norm.weight"), f"model.layers.{layer}.attn.norm.weight")
  inner = heads // c.o_groups
  o_a = (name("wo_a.weight", "o_a_proj.weight"),)
  out = [
    vector((*path, "sinks"), (c.num_heads,), *name("attn_sink", "sinks"), dtype="float32"),
    matrix((*path, "q_a"), (d, c.q_rank), *name("wq_a.weight", "q_a_proj.weight")),
    vector((*path, "q_norm"), (c.q_rank,), *name("q_norm.weight", "q_a_norm.weight")),
    matrix((*path, "q_b"), (c.q_rank, heads), *name("wq_b.weight", "q_b_proj.weight")),
    matrix((*path, "kv"), (d, c.head_dim), *name("wkv.weight", "kv_proj.weight")),
    vector((*path, "kv_norm"), (c.head_dim,), *kv_norm),
    Tensor(
      (*path, "o_a"), (c.o_groups, inner, c.o_rank), (o_a,), transposed=True, split=c.o_groups
    ),
    matrix((*path, "o_b"), (c.o_groups * c.o_rank, d), *name("wo_b.weight", "o_b_proj.weight")),
  ]
  if c.ratios[layer]:
    series = 2 if c.kinds[layer] == CSA else 1
    out += _compressor(c, layer, (*path, "compressor"), series, c.head_dim, "", "compressor.")
  if c.kinds[layer] == CSA:
    path, theirs = (*path, "indexer"), "compressor.indexer."
    q = name("indexer.wq_b.weight", theirs + "q_b_proj.weight")
    weights = name("indexer.weights_proj.weight", theirs + "scorer.weights_proj.weight")
    out.append(matrix((*path, "q"), (c.q_rank, c.index_heads * c.index_dim), *q))
    out.append(matrix((*path, "weights"), (d, c.index_heads), *weights))
    out += _compressor(c, layer, (*path, "compressor"), 2, c.index_dim, "indexer.", theirs)
  return out


def _compressor(c, layer, path, series, width, release, transformers) -> list[Tensor]:
  def name(ours, theirs):
    return _names(layer, f"attn.{release}compressor.{ours}", f"self_attn.{transformers}{theirs}")

  shape, bias = (c.hidden_size, series * width), (c.ratios[layer], series * width)
  return [
    matrix((*path, "kv"), shape, *name("wkv.weight", "kv_proj.weight")),
    matrix((*path, "gate"), shape, *name("wgate.weight", "gate_proj.weight")),
    vector((*path, "position_bias"), bias, *name("ape", "position_bias"), dtype="float32"),
    vector((*path, "norm"), (width,), *name("norm.weight", "kv_norm.weight")),
  ]


def _moe(c: DeepseekV4Config, layer: int) -> list[Tensor]:
  d, e, path = c.hidden_size, c.num_experts, (f"layers_{layer}", "moe")
  name = lambda release, transformers: _names(layer, f"ffn.{release}", f"mlp.{transformers}")

  def expert(e, part):
    return name(f"experts.{e}.{_EXPERT[part]}.weight", f"experts.{e}.{_PROJ[part]}.weight")

  fused = tuple((f"model.layers.{layer}.mlp.experts.{p}_proj",) for p in ("gate_up", "down"))
  out = [
    matrix((*path, "router"), (d, e), *name("gate.weight", "gate.weight")),
    *experts((*path, "experts"), e, d, c.expert_size, expert, fused),
  ]
  if layer in c.hash_layers:
    names = name("gate.tid2eid", "gate.tid2eid")
    out.append(vector((*path, "hash_table"), (c.vocab_size, c.top_k), *names, dtype="int32"))
  else:
    names = name("gate.bias", "gate.e_score_correction_bias")
    out.append(vector((*path, "router_bias"), (e,), *names, dtype="float32"))
  if c.shared_size:
    shared = (
      name(f"shared_experts.{_EXPERT[p]}.weight", f"shared_experts.{_PROJ[p]}.weight")
      for p in ("gate", "up", "down")
    )
    out += gated((*path, "shared"), d, c.shared_size, *shared)
  return out
