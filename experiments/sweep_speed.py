"""A branch sweep against the same sweep done with PyTorch transformers: a part of the benchmark.

All 360 classes under B of one sum of dsv4-nano, 64 tokens each. There, the combine of one layer is
replaced at the event by a loop in the class's order and rounding; the same classes then go on with
the cache, one at a time and as batches. Both are given what they compile or allocate once.
"""

import time

import numpy as np

import moejax
from moejax import combine, inference
from moejax.combine.orders import class_representatives

_PROMPT, _LAYER, _TOKENS = "why the sheep", 5, 64
_ALONE = 12  # branches that are run one at a time; the others are taken to need as long
_BATCHES = (120, 360)
_ROUNDS = 2


def sweep_part():
  """Rows of the benchmark; none where transformers is not installed."""
  theirs = _Transformers.load()
  if theirs is None:
    return
  model = moejax.load("dsv4-nano")
  prompt = model.tokenizer.encode(_PROMPT)
  classes = class_representatives(model.config.top_k, combine.B)

  def ours():
    event = inference.freeze(model, prompt, _LAYER, len(prompt) + _TOKENS)
    return inference.branch_sweep(model, event, combine.B, _TOKENS).tokens

  ours()
  theirs.branches(prompt, classes[:2])
  times = {"moejax": [], "transformers, one at a time": []}
  times |= {f"transformers, batches of {size}": [] for size in _BATCHES}
  for _ in range(_ROUNDS):
    times["moejax"].append(_seconds(ours))
    alone = _seconds(lambda: [theirs.branches(prompt, c[None]) for c in classes[:_ALONE]])
    times["transformers, one at a time"].append(alone * len(classes) / _ALONE)
    for size in _BATCHES:
      parts = np.array_split(classes, len(classes) // size)
      run = lambda parts=parts: [theirs.branches(prompt, part) for part in parts]
      times[f"transformers, batches of {size}"].append(_seconds(run))
  yield from _rows(times, len(classes) * _TOKENS)


def _rows(times, work: int):
  base = np.array(times["moejax"])
  for name, measured in times.items():
    median = np.median(measured)
    scaled = f" (of {_ALONE}, scaled)" if "one at" in name else ""
    yield (
      "sweep",
      f"360 classes, {_TOKENS} tokens",
      name + scaled,
      f"{1e3 * median:.4g}",
      f"{work / median:.4g}",
      "tokens/s",
      f"{np.median(base / np.array(measured)):.3g}",
      "moejax",
      str(len(measured)),
    )


def _seconds(run) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


class _Transformers:
  """dsv4-nano in BF16 with its cache, and a combine that can be told its order."""

  def __init__(self, model):
    self._model, self._orders = model, None
    self._experts = model.model.layers[_LAYER].mlp.experts
    self._native = self._experts.forward
    self._experts.forward = self._combine

  @classmethod
  def load(cls):
    """The shipped model; None where transformers is not installed."""
    try:
      import torch
      import transformers
    except ImportError:
      return None
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
      moejax.load("dsv4-nano").directory, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return cls(model.eval())

  def branches(self, prompt: list[int], orders: np.ndarray) -> np.ndarray:
    """int [P, N]: emitted tokens of the classes orders [P, K]."""
    import torch

    ids = torch.tensor([prompt] * len(orders))
    emitted = []
    with torch.inference_mode():
      out = self._model(ids, use_cache=True, logits_to_keep=1)
      for step in range(_TOKENS):
        emitted.append(out.logits[:, -1].argmax(-1, keepdim=True))
        if step < _TOKENS - 1:
          self._orders = None if step else torch.from_numpy(orders).long()
          out = self._model(emitted[-1], past_key_values=out.past_key_values, use_cache=True)
    self._orders = None
    return torch.cat(emitted, dim=1).numpy()

  def _combine(self, hidden, index, weights):
    """The native experts, or the event's: terms by ascending id, added in order in BF16."""
    if self._orders is None:
      return self._native(hidden, index, weights)
    import torch

    experts = self._experts
    index, slots = index.sort(dim=-1)
    weights = weights.gather(-1, slots)
    gate_up = torch.einsum("td,tkfd->tkf", hidden, experts.gate_up_proj[index])
    terms = torch.einsum("tkf,tkdf->tkd", experts._apply_gate(gate_up), experts.down_proj[index])
    terms = (terms * weights[..., None]).to(hidden.dtype)
    total = torch.zeros_like(hidden)
    rows = torch.arange(len(hidden))
    for place in self._orders.T:
      total = total + terms[rows, place]
    return total
