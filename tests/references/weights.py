"""Random checkpoints of the cases in the layout of the published ones, the same on every machine.

Each tensor is drawn from a generator of its own, seeded by its name, in integer arithmetic: neither
the order of tensors nor the version of NumPy matters. Values are BF16 numbers in float32 arrays,
but for those that the release keeps in FP32.
"""

import hashlib
import json
import math
from pathlib import Path
import re

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.references.cases import Case

# DeepSeek-V4 keeps these in FP32.
_FLOAT32 = re.compile(r"(^|\.)(hc_\w+|attn_sink|ape|gate\.bias)$")


def words(seed: int, name: str, *shape: int) -> np.ndarray:
  """uint64, the raw stream of a Philox generator keyed by seed and name."""
  key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
  generator = np.random.Philox(key=int.from_bytes(key, "little"))
  return generator.random_raw(math.prod(shape)).reshape(shape)


def normal(seed: int, name: str, *shape: int) -> np.ndarray:
  """float64 of mean 0 and variance 1: the sum of four uniform 16-bit integers, so nearly normal."""
  quarters = words(seed, name, *shape, 1).view(np.uint16)
  return (quarters.sum(-1, dtype=np.int64) - 2 * 65535) / np.sqrt((65536.0**2 - 1) / 3)


def tokens(case: Case) -> np.ndarray:
  """int32 [B, T]."""
  if case.text is not None:
    return np.frombuffer(case.text.encode(), np.uint8).astype(np.int32)[None]
  drawn = words(case.seed, "tokens", case.batch, case.length) % np.uint64(case.config["vocab_size"])
  return drawn.astype(np.int32)


def tensors(case: Case) -> dict[str, np.ndarray]:
  """Published name → float32 (int64 for tables), sorted by name."""
  draw = _draw_deepseek_v4 if case.family == "deepseek_v4" else _draw_llama
  out = {}
  for name, shape in sorted(shapes(case.config).items()):
    value = draw(case, name, shape)
    if stored_dtype(name) == ml_dtypes.bfloat16:
      # By way of float32: releases of ml_dtypes before 0.7 rounded float64 twice, later ones once.
      value = value.astype(np.float32).astype(ml_dtypes.bfloat16)
    out[name] = value if value.dtype == np.int64 else value.astype(np.float32)
  return out


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
  """Published names of a config's tensors, all there are, and their shapes."""
  v4 = config["model_type"] == "deepseek_v4"
  return (_deepseek_v4_shapes if v4 else _llama_shapes)(config)


def stored_dtype(name: str):
  """What a file holds of a tensor."""
  if name.endswith("tid2eid"):
    return np.int64
  return np.float32 if _FLOAT32.search(name) else ml_dtypes.bfloat16


def digest(case: Case) -> np.ndarray:
  """uint8 [32], SHA-256 of names and values."""
  sha = hashlib.sha256()
  for name, value in tensors(case).items():
    sha.update(f"{name} {value.dtype.str} {value.shape}".encode())
    sha.update(value.tobytes())
  return np.frombuffer(sha.digest(), np.uint8)


def write_checkpoint(case: Case, directory, shards: int = 3) -> Path:
  """Writes config.json, safetensors and, for a case with text, a tokenizer; returns the directory.

  One shard is a file without index. With more, the experts of a layer straddle shards.
  """
  directory = Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(case.config, indent=2, sort_keys=True) + "\n")
  stored = {name: value.astype(stored_dtype(name)) for name, value in tensors(case).items()}
  files = {}
  for shard in range(shards):
    number = f"-{shard + 1:05d}-of-{shards:05d}" if shards > 1 else ""
    file = f"model{number}.safetensors"
    part = {name: stored[name] for name in list(stored)[shard::shards]}
    save_file(part, directory / file, metadata={"format": "pt"})
    files |= dict.fromkeys(part, file)
  if shards > 1:
    size = sum(value.nbytes for value in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
  if case.text is not None:
    _write_tokenizer(directory)
  return directory


def moe_layers(config) -> list[int]:
  """Which layers have experts, from the rules of the families' own code."""
  layers = range(config["num_hidden_layers"])
  if config["model_type"] == "deepseek":
    first, every = config["first_k_dense_replace"], config["moe_layer_freq"]
    return [i for i in layers if i >= first and i % every == 0]
  if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
    dense, step = config.get("mlp_only_layers", []), config["decoder_sparse_step"]
    return [i for i in layers if i not in dense and (i + 1) % step == 0]
  return list(layers)


def is_hash(config, layer: int) -> bool:
  """Whether a table routes the layer."""
  if "mlp_layer_types" in config:
    return config["mlp_layer_types"][layer] == "hash_moe"
  return layer < config.get("num_hash_layers", 0)


def _llama_shapes(c) -> dict[str, tuple[int, ...]]:
  hidden, vocab = c["hidden_size"], c["vocab_size"]
  shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
  if not c["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (vocab, hidden)
  with_experts = moe_layers(c)
  for layer in range(c["num_hidden_layers"]):
    prefix = f"model.layers.{layer}."
    shapes[prefix + "input_layernorm.weight"] = (hidden,)
    shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes |= _attention_shapes(c, prefix + "self_attn.")
    if layer in with_experts:
      shapes |= _moe_shapes(c, prefix)
    else:
      shapes |= _mlp_shapes(prefix + "mlp.", hidden, c["intermediate_size"])
  return shapes


def _attention_shapes(c, prefix):
  hidden, family = c["hidden_size"], c["model_type"]
  head = c.get("head_dim") or hidden // c["num_attention_heads"]
  queries, keys = head * c["num_attention_heads"], head * c["num_key_value_heads"]
  shapes = {
    "q_proj.weight": (queries, hidden),
    "k_proj.weight": (keys, hidden),
    "v_proj.weight": (keys, hidden),
    "o_proj.weight": (hidden, queries),
  }
  if family == "olmoe":
    shapes |= {"q_norm.weight": (queries,), "k_norm.weight": (keys,)}
  if family == "qwen3_moe":
    shapes |= {"q_norm.weight": (head,), "k_norm.weight": (head,)}
  if family == "qwen2_moe":
    shapes |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
  return {prefix + name: shape for name, shape in shapes.items()}


_GATE_UP_DOWN, _W1_W3_W2 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def _mlp_shapes(prefix, hidden, width, names=_GATE_UP_DOWN):
  gate, up, down = (f"{prefix}{name}.weight" for name in names)
  return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def _moe_shapes(c, prefix):
  hidden, family = c["hidden_size"], c["model_type"]
  prefix += "block_sparse_moe." if family == "mixtral" else "mlp."
  num = next(c[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in c)
  width = c.get("moe_intermediate_size", c["intermediate_size"])
  names = _W1_W3_W2 if family == "mixtral" else _GATE_UP_DOWN
  shapes = {prefix + "gate.weight": (num, hidden)}
  for expert in range(num):
    shapes |= _mlp_shapes(f"{prefix}experts.{expert}.", hidden, width, names)
  if family == "qwen2_moe":
    shared = c["shared_expert_intermediate_size"]
    shapes |= _mlp_shapes(prefix + "shared_expert.", hidden, shared)
    shapes[prefix + "shared_expert_gate.weight"] = (1, hidden)
  if family == "deepseek" and c["n_shared_experts"]:
    shapes |= _mlp_shapes(prefix + "shared_experts.", hidden, width * c["n_shared_experts"])
  return shapes


def _draw_llama(case, name, shape):
  x = normal(case.seed, name, *shape)
  if name.endswith("norm.weight"):
    return 1 + 0.2 * x
  if name.endswith(".bias"):
    return 0.3 * x
  if "embed_tokens" in name and not case.config["tie_word_embeddings"]:
    return x
  return x * 1.6 / np.sqrt(shape[-1])


def _ratio(c, layer) -> int:
  """How many tokens a compressed entry of the layer covers, 0 for a window-only layer."""
  if "compress_ratios" in c:
    return c["compress_ratios"][layer]
  return c["compress_rates"].get(c["layer_types"][layer], 0)


def _is_csa(c, layer) -> bool:
  if "compress_ratios" in c:
    return c["compress_ratios"][layer] == 4
  return c["layer_types"][layer] == "compressed_sparse_attention"


def _deepseek_v4_shapes(c) -> dict[str, tuple[int, ...]]:
  hidden, vocab, streams = c["hidden_size"], c["vocab_size"], c["hc_mult"]
  shapes = {
    "embed.weight": (vocab, hidden),
    "head.weight": (vocab, hidden),
    "norm.weight": (hidden,),
    "hc_head_fn": (streams, streams * hidden),
    "hc_head_base": (streams,),
    "hc_head_scale": (1,),
  }
  for layer in range(c["num_hidden_layers"]):
    prefix = f"layers.{layer}."
    for site in ("attn", "ffn"):
      mixes = (2 + streams) * streams
      shapes[f"{prefix}{site}_norm.weight"] = (hidden,)
      shapes[f"{prefix}hc_{site}_fn"] = (mixes, streams * hidden)
      shapes[f"{prefix}hc_{site}_base"] = (mixes,)
      shapes[f"{prefix}hc_{site}_scale"] = (3,)
    shapes |= _sparse_attention_shapes(c, layer, prefix + "attn.")
    shapes |= _routed_shapes(c, layer, prefix + "ffn.")
  if c["num_nextn_predict_layers"]:  # a few of the tensors that a reader has to leave alone
    shapes |= dict.fromkeys(("mtp.0.enorm.weight", "mtp.0.norm.weight"), (hidden,))
    shapes["mtp.0.attn.wkv.weight"] = (c["head_dim"], hidden)
  return shapes


def _sparse_attention_shapes(c, layer, prefix):
  hidden, heads, head, rank = (
    c[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
  )
  groups, ratio = c["o_groups"], _ratio(c, layer)
  shapes = {
    "attn_sink": (heads,),
    "wq_a.weight": (rank, hidden),
    "q_norm.weight": (rank,),
    "wq_b.weight": (heads * head, rank),
    "wkv.weight": (head, hidden),
    "kv_norm.weight": (head,),
    "wo_a.weight": (groups * c["o_lora_rank"], heads * head // groups),
    "wo_b.weight": (hidden, groups * c["o_lora_rank"]),
  }
  if ratio:
    series = 2 if _is_csa(c, layer) else 1
    shapes |= _compressor_shapes("compressor.", hidden, head, ratio, series)
  if _is_csa(c, layer):
    index_heads, index_head = c["index_n_heads"], c["index_head_dim"]
    shapes["indexer.wq_b.weight"] = (index_heads * index_head, rank)
    shapes["indexer.weights_proj.weight"] = (index_heads, hidden)
    shapes |= _compressor_shapes("indexer.compressor.", hidden, index_head, ratio, 2)
  return {prefix + name: shape for name, shape in shapes.items()}


def _compressor_shapes(prefix, hidden, head, ratio, series):
  return {
    prefix + "wkv.weight": (series * head, hidden),
    prefix + "wgate.weight": (series * head, hidden),
    prefix + "ape": (ratio, series * head),
    prefix + "norm.weight": (head,),
  }


def _routed_shapes(c, layer, prefix):
  hidden, num, width = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"]
  shapes = {prefix + "gate.weight": (num, hidden)}
  if is_hash(c, layer):
    shapes[prefix + "gate.tid2eid"] = (c["vocab_size"], c["num_experts_per_tok"])
  else:
    shapes[prefix + "gate.bias"] = (num,)
  for expert in range(num):
    shapes |= _mlp_shapes(f"{prefix}experts.{expert}.", hidden, width, _W1_W3_W2)
  return shapes | _mlp_shapes(prefix + "shared_experts.", hidden, width, _W1_W3_W2)


def _draw_deepseek_v4(case, name, shape):
  if name.endswith("tid2eid"):
    rows = words(case.seed, name, shape[0], case.config["n_routed_experts"])
    return np.argsort(rows, axis=1, kind="stable")[:, : shape[1]].astype(np.int64)
  x = normal(case.seed, name, *shape)
  if "norm" in name:
    return 1 + 0.1 * x
  if name.endswith("gate.bias"):
    return 0.05 * x
  if name.endswith("_scale"):
    return 0.5 + 0.1 * x
  if name.endswith("_base"):
    return 0.3 * x
  if name.endswith(("attn_sink", "ape", "embed.weight")):
    return 0.5 * x
  return x / np.sqrt(shape[-1])


def _write_tokenizer(directory):
  """A byte-level tokenizer: an id is a byte, then three special tokens."""
  from tokenizers import AddedToken, decoders, models, pre_tokenizers, Tokenizer

  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = iter(range(256, 512))  # how byte-level tokenizers write the bytes that do not print
  vocabulary = {chr(b if b in printable else next(others)): b for b in range(256)}
  tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  special = ("<bos>", "<eos>", "<pad>")
  tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
  tokenizer.save(str(directory / "tokenizer.json"))
  names = dict(zip(("bos_token", "eos_token", "pad_token"), special))
  config = dict(names, tokenizer_class="PreTrainedTokenizerFast", model_max_length=256)
  (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
