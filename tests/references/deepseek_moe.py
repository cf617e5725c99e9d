"""DeepSeek-MoE v1 in plain torch, after the code that ships with that model.

transformers has no class for it. Values are rounded where the remote code rounds them: the router's
softmax and the expert sum are in the dtype of the activations, and experts add in ascending order.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
import torch
from torch.nn import functional

from tests.references.traces import keys_and_values, logits_and_routes, Route, route, Step, trace


def run(directory, tokens: np.ndarray, prompt: int, new: int) -> dict[str, np.ndarray]:
  """All arrays of `traces.trace` in float32."""
  return trace(Runner(directory), tokens, prompt, new)


def run_bfloat16(directory, tokens: np.ndarray) -> dict[str, np.ndarray]:
  """Arrays of one full pass in BF16."""
  return logits_and_routes(Runner(directory, torch.bfloat16), tokens)


class Runner:
  """The model of a checkpoint directory; a cache maps a layer to its keys and values."""

  def __init__(self, directory, dtype=torch.float32):
    directory = Path(directory)
    self.config, self.dtype = json.loads((directory / "config.json").read_text()), dtype
    self.weights = {}
    for file in directory.glob("*.safetensors"):
      self.weights |= {name: value.to(dtype) for name, value in load_file(file).items()}

  def new_cache(self):
    return {}

  def cache_arrays(self, cache) -> dict[str, np.ndarray]:
    """keys and values [L, B, Hkv, T, C]."""
    return keys_and_values([cache[layer] for layer in sorted(cache)])

  def step(self, tokens, cache) -> Step:
    c, step = self.config, Step(None, [], [])
    x = self.weights["model.embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
      prefix = f"model.layers.{layer}."
      x = x + self._attention(self._norm(x, prefix + "input_layernorm"), layer, cache)
      h = self._norm(x, prefix + "post_attention_layernorm")
      if layer >= c["first_k_dense_replace"] and layer % c["moe_layer_freq"] == 0:
        routed, decided = self._moe(h.flatten(0, 1), layer)
        x = x + routed.view_as(x)
        step.routes.append(decided)
      else:
        x = x + self._mlp(h, prefix + "mlp.")
      step.blocks.append(x)
    step.logits = self._linear(self._norm(x, "model.norm"), "lm_head")
    return step

  def _linear(self, x, name):
    return functional.linear(x, self.weights[name + ".weight"])

  def _norm(self, x, name):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
    return self.weights[name + ".weight"] * h.to(x.dtype)

  def _mlp(self, x, prefix):
    gate = functional.silu(self._linear(x, prefix + "gate_proj"))
    return self._linear(gate * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

  def _rotate(self, x, positions):
    """x [B, H, T, C]; pairs are half a head apart."""
    size = x.shape[-1]
    inverse = 1.0 / self.config["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    angles = torch.cat([positions.float()[:, None] * inverse] * 2, -1)
    half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return x * angles.cos().to(x.dtype) + half * angles.sin().to(x.dtype)

  def _attention(self, x, layer, cache):
    c, prefix = self.config, f"model.layers.{layer}.self_attn."
    (batch, length), heads = x.shape[:2], c["num_attention_heads"]
    past = cache[layer][0].shape[2] if layer in cache else 0
    positions = torch.arange(past, past + length)

    def project(name, heads):
      return self._linear(x, prefix + name).view(batch, length, heads, -1).transpose(1, 2)

    q = self._rotate(project("q_proj", heads), positions)
    k = self._rotate(project("k_proj", c["num_key_value_heads"]), positions)
    v = project("v_proj", c["num_key_value_heads"])
    if past:
      k, v = (torch.cat(pair, 2) for pair in zip(cache[layer], (k, v)))
    cache[layer] = k, v
    k, v = (t.repeat_interleave(heads // c["num_key_value_heads"], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    hidden = torch.arange(past + length) > positions[:, None]
    scores = scores + torch.zeros_like(scores).masked_fill(hidden, torch.finfo(self.dtype).min)
    mixed = torch.softmax(scores.float(), -1).to(self.dtype) @ v
    return self._linear(mixed.transpose(1, 2).reshape(batch, length, -1), prefix + "o_proj")

  def _moe(self, x, layer) -> tuple[torch.Tensor, Route]:
    """x [N, D]."""
    c, prefix = self.config, f"model.layers.{layer}.mlp."
    logits = self._linear(x, prefix + "gate")
    scores = logits.softmax(-1)
    # A stable sort, so that of equal scores the lowest expert id comes first.
    ids = torch.argsort(-scores.float(), dim=-1, stable=True)[:, : c["num_experts_per_tok"]]
    gates = scores.gather(1, ids)
    if c["norm_topk_prob"] and c["num_experts_per_tok"] > 1:
      gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    total = torch.zeros_like(x)
    for expert in range(c["n_routed_experts"]):
      token, slot = torch.where(ids == expert)
      term = self._mlp(x[token], f"{prefix}experts.{expert}.") * gates[token, slot, None]
      total[token] = total[token] + term
    if c["n_shared_experts"]:
      total = total + self._mlp(x, prefix + "shared_experts.")
    return total, route(layer, logits, ids, gates, scores, measure=logits)
