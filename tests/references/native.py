"""The models of transformers on a checkpoint directory, watched by hooks."""

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache

from tests.references.traces import keys_and_values, logits_and_routes, Route, route, Step, trace


def run(directory, tokens: np.ndarray, prompt: int, new: int) -> dict[str, np.ndarray]:
  """All arrays of `traces.trace` in float32, eager attention and experts, of tokens [B, T]."""
  return trace(Runner(directory), tokens, prompt, new)


def run_bfloat16(directory, tokens: np.ndarray, experts: str) -> dict[str, np.ndarray]:
  """Arrays of one full pass in BF16. experts: "eager", "grouped_mm" or "batched_mm"."""
  return logits_and_routes(Runner(directory, torch.bfloat16, experts), tokens)


def load_report(directory) -> dict[str, list[str]]:
  """What transformers says of a checkpoint: its missing, unexpected and mismatched tensors."""
  _, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
  kinds = ("missing", "unexpected", "mismatched")
  return {kind: sorted(map(str, report[f"{kind}_keys"])) for kind in kinds}


class Runner:
  """A model that tells what its layers did."""

  def __init__(self, directory, dtype=torch.float32, experts="eager"):
    self.model = AutoModelForCausalLM.from_pretrained(
      directory, dtype=dtype, attn_implementation="eager", experts_implementation=experts
    ).eval()
    self.is_v4 = self.model.config.model_type == "deepseek_v4"
    for number, layer in enumerate(self.model.model.layers):
      self._watch(number, layer)

  def _watch(self, number, layer):
    layer.register_forward_hook(lambda module, args, out: self._step.blocks.append(out))
    gate = getattr(layer.mlp, "gate", None)  # a dense layer has none
    if gate is not None:
      gate.register_forward_hook(
        lambda module, args, out: self._step.routes.append(self._route(number, module, out))
      )
    indexer = getattr(getattr(layer.self_attn, "compressor", None), "indexer", None)
    if indexer is not None:
      indexer.scorer.register_forward_hook(lambda module, args, out: self._pick_scores.append(out))
      indexer.register_forward_hook(lambda module, args, out: self._pick(module, out))

  def new_cache(self):
    return DynamicCache(config=self.model.config)

  def step(self, tokens, cache) -> Step:
    self._step, self._pick_scores, self._start = Step(None, [], []), [], cache.get_seq_length()
    self._step.logits = self.model(tokens, cache=cache, use_cache=True).logits
    return self._step

  def _route(self, number, gate, out) -> Route:
    logits, weights, ids = out
    if not self.is_v4:
      return route(number, logits, ids, weights, logits.float().softmax(-1), measure=logits)
    if hasattr(gate, "tid2eid"):
      return route(number, logits, ids, weights, None)
    scores = functional.softplus(logits).sqrt() + gate.e_score_correction_bias
    return route(number, logits, ids, weights, scores)

  def _pick(self, indexer, ids):
    self._step.picks.append(ids.sort(dim=-1).values)
    scores, k = self._pick_scores[-1], indexer.index_topk
    if scores.shape[-1] <= k:
      return
    ready = (self._start + 1 + torch.arange(scores.shape[1])) // indexer.compress_rate
    unready = torch.arange(scores.shape[-1]) >= ready[:, None]
    best = scores.masked_fill(unready, -torch.inf).topk(k + 1, dim=-1).values
    gaps = (best[..., k - 1] - best[..., k])[:, ready > k]
    self._step.pick_margins += gaps.flatten().tolist()

  def cache_arrays(self, cache) -> dict[str, np.ndarray]:
    """keys and values [L, B, Hkv, T, C]; of DeepSeek-V4 what each layer has, [B, rows, width].

    The latter are named "cache/<layer>/<part>", parts as in transformers: window, and then
    buffer_kv/compressor, compressed_kv/indexer, ...
    """
    if not self.is_v4:
      return keys_and_values([(layer.keys, layer.values) for layer in cache.layers])
    out = {}
    for number, layer in enumerate(cache.layers):
      out[f"cache/{number}/window"] = layer.keys[:, 0]
      for part in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
        for owner, value in getattr(layer, part, {}).items():
          if value is not None:
            out[f"cache/{number}/{part}/{owner}"] = value
    return {name: value.float().numpy() for name, value in out.items()}
