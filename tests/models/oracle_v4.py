"""DeepSeek-V4 in NumPy, one token after another, written from sections 2 to 4 of the design page.

Tensors have the names and axes of the release. Three roundings: none in float64, the places where
the inference code of the release rounds, and those where transformers does. Nothing of moejax is
used but elementwise functions, softmax and quantisers, whose bits under NumPy have their own tests.
"""

import dataclasses
import math

import numpy as np

from moejax import numerics
from tests.models.oracle_kv import Canonical, Exact, first_best, root_mean_square, rotary_tables


def hadamard(x):
  """Sylvester's matrix times x over the last axis, unscaled; exact before it becomes float32."""
  matrix = np.ones((1, 1))
  while len(matrix) < x.shape[-1]:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return (x.astype(np.float64) @ matrix).astype(x.dtype)


def yarn(frequencies, rope, base):
  """The frequencies θ_i as YaRN scales them (section 2.3)."""
  original, width = rope["original_max_position_embeddings"], 2 * len(frequencies)

  def index(turns):
    return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

  low, high = math.floor(index(rope["beta_fast"])), math.ceil(index(rope["beta_slow"]))
  ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
  return frequencies / rope["factor"] * ramp + frequencies * (1 - ramp)


@dataclasses.dataclass
class Compressor:
  """Section 4: entries so far; projections and pooling logits of the tokens not yet forgotten."""

  entries: list
  values: np.ndarray
  scores: np.ndarray


class Sequence:
  """One sequence; `step` reads its next token.

  Args:
    config, tensors: of a checkpoint.
    rounding: "float64", "reference" or "hf".
    qdq: whether activations are quantised as in section 2.2.
    kv_bits: bits of the symmetric grid over each stored key-value vector, or None.

  Attributes:
    trace: of each step and layer, values by the names of `moejax.models.Taps`; and picks, the
      entries that an indexer chose.
  """

  def __init__(self, config, tensors, rounding="float64", qdq=False, kv_bits=None):
    self.c, self.rounding, self.qdq, self.kv_bits = config, rounding, qdq, kv_bits
    self.ops = Exact if rounding == "float64" else Canonical
    self.w = {
      name: value if value.dtype == np.int64 else value.astype(self.ops.dtype)
      for name, value in tensors.items()
    }
    self.rope_dim = config.get("qk_rope_head_dim") or int(
      config["head_dim"] * config["partial_rotary_factor"]
    )
    self.position, self.trace = 0, []
    layers = range(config["num_hidden_layers"])
    shape = (config["sliding_window"], config["head_dim"])
    self.windows = [np.zeros(shape, self.ops.dtype) for _ in layers]
    self.compressors = [self.empty(layer, "compressor.") for layer in layers]
    self.indexers = [self.empty(layer, "indexer.compressor.") for layer in layers]

  # What the layers are.

  def ratio(self, layer):
    if "compress_ratios" in self.c:
      return self.c["compress_ratios"][layer]
    return self.c["compress_rates"].get(self.c["layer_types"][layer], 0)

  def is_csa(self, layer):
    return f"layers.{layer}.attn.indexer.wq_b.weight" in self.w

  def empty(self, layer, name):
    bias = self.w.get(f"layers.{layer}.attn.{name}ape")
    if bias is None:
      return None
    shape = ((2 if self.is_csa(layer) else 1) * len(bias), bias.shape[1])
    zeros = np.zeros(shape, self.ops.dtype)
    return Compressor([], zeros, np.full_like(zeros, -np.inf))

  def frequencies(self, layer):
    """(base, function that scales frequencies)."""
    same = lambda frequencies: frequencies
    parameters = self.c.get("rope_parameters")
    if not self.ratio(layer):
      return (parameters["main"] if parameters else self.c)["rope_theta"], same
    if parameters:
      return parameters["compress"]["rope_theta"], same
    base = self.c["compress_rope_theta"]
    return base, lambda frequencies: yarn(frequencies, self.c["rope_scaling"], base)

  # Rounding.

  def r(self, x):
    """R, in both roundings."""
    return self.ops.round(x)

  def ref(self, x):
    """Rounded by the inference code of the release only."""
    return self.r(x) if self.rounding == "reference" else x

  def hf(self, x):
    """Rounded by transformers only."""
    return self.r(x) if self.rounding == "hf" else x

  def number(self, x):
    return self.ops.dtype(x)

  # Section 2.

  def step(self, token):
    """Logits [V] after the next token."""
    c = self.c
    self.trace.append([])
    x = np.tile(self.w["embed.weight"][token], (c["hc_mult"], 1))
    for layer in range(c["num_hidden_layers"]):
      self.trace[-1].append({})
      for site, branch in (("attn", self.attention), ("ffn", self.moe)):
        prefix = f"layers.{layer}."
        h, post, comb = self.collapse(x, f"{prefix}hc_{site}")
        h = self.norm(h, f"{prefix}{site}_norm")
        x = self.expand(branch(layer, h, token), x, post, comb)
      self.note(post_block=x)
    mix = self.mix(x, "hc_head")
    pre = self.ops.sigmoid(mix * self.w["hc_head_scale"][0] + self.w["hc_head_base"])
    h = self.norm(self.r(self.weighted(pre + self.number(c["hc_eps"]), x)), "norm")
    self.position += 1
    return self.hf(self.ops.dot(h, self.w["head.weight"]))

  def note(self, **values):
    self.trace[-1][-1].update(values)

  def norm(self, x, name):
    """R(w · x / rms), one rounding."""
    return self.r(self.w[name + ".weight"] * self.divide_rms(x))

  def divide_rms(self, x):
    return x / root_mean_square(self.ops, x, self.c["rms_norm_eps"])

  def linear(self, x, name):
    """A quantised linear: R(W QDQ8(x))."""
    return self.r(self.ops.dot(self.qdq8(x, 128), self.w[name + ".weight"]))

  def qdq8(self, x, group):
    return self.r(numerics.qdq_fp8(x, min(group, x.shape[-1]))) if self.qdq else x

  # Section 2.1.

  def mix(self, x, site):
    f, fn = x.reshape(-1), self.w[site + "_fn"]
    if self.rounding == "hf":
      return self.ops.dot(self.divide_rms(f), fn)
    return self.ops.dot(f, fn) / root_mean_square(self.ops, f, self.c["rms_norm_eps"])

  def weighted(self, weights, x):
    """Σ_i weights_i · x_i, ascending."""
    total = weights[0] * x[0]
    for weight, stream in zip(weights[1:], x[1:]):
      total = total + weight * stream
    return total

  def collapse(self, x, site):
    """(branch input [D], post [n], comb [n source, n dest])."""
    n, eps = self.c["hc_mult"], self.number(self.c["hc_eps"])
    scale, base = self.w[site + "_scale"], self.w[site + "_base"]
    mix = self.mix(x, site)
    pre = self.ops.sigmoid(mix[:n] * scale[0] + base[:n]) + eps
    post = self.number(2) * self.ops.sigmoid(mix[n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mix[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    comb = self.ops.softmax(comb) + eps
    for iteration in range(self.c["hc_sinkhorn_iters"]):
      if iteration:
        comb = comb / (self.ops.sum(comb) + eps)[:, None]
      comb = comb / (self.ops.sum(comb.T) + eps)[None]
    return self.r(self.weighted(pre, x)), post, comb

  def expand(self, branch, x, post, comb):
    post, comb = self.hf(post), self.hf(comb)
    mixed = [self.hf(self.weighted(comb[:, j], x)) for j in range(len(x))]
    return np.stack([self.r(self.hf(p * branch) + m) for p, m in zip(post, mixed)])

  # Section 2.3.

  def attention(self, layer, x, token):
    c, p, prefix = self.c, self.position, f"layers.{layer}.attn."
    q_rank = self.norm(self.linear(x, prefix + "wq_a"), prefix + "q_norm")
    q = self.linear(q_rank, prefix + "wq_b").reshape(-1, c["head_dim"])
    q = self.rotate(layer, self.head_norm(q), p)
    kv = self.norm(self.linear(x, prefix + "wkv"), prefix + "kv_norm")
    window = self.windows[layer]
    window[p % len(window)] = self.stored(self.rotate(layer, kv, p))
    keys = [window[s % len(window)] for s in range(max(0, p - len(window) + 1), p + 1)]
    keys += self.compressed(layer, x, q_rank)
    out = self.attend(q, np.stack(keys), self.w[prefix + "attn_sink"])
    out = self.rotate(layer, out, p, inverse=True)
    groups = out.reshape(c["o_groups"], -1)
    w = self.w[prefix + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1)
    out = np.concatenate([self.r(self.ops.dot(g, m)) for g, m in zip(groups, w)])
    return self.linear(out, prefix + "wo_b")

  def head_norm(self, q):
    """q · rsqrt(mean(q²) + eps) per head: in BF16 throughout, or a rounded rsqrt and product."""
    square = self.ref(q * q)
    mean = self.ref(self.ops.sum(square) / self.number(q.shape[-1]))
    root = np.sqrt(self.ref(mean + self.number(self.c["rms_norm_eps"])))
    return self.r(q * self.r(1 / root)[:, None])

  def rotate(self, layer, x, p, inverse=False):
    """Pairs (2i, 2i + 1) of the last channels, by the angles of position p."""
    tables = rotary_tables([p], self.rope_dim, *self.frequencies(layer))
    cos, sin = (self.hf(t[0].astype(self.ops.dtype)) for t in tables)
    sin = -sin if inverse else sin
    tail = x[..., -self.rope_dim :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    out = x.copy()
    out[..., -self.rope_dim :: 2] = self.r(even * cos - odd * sin)
    out[..., -self.rope_dim + 1 :: 2] = self.r(odd * cos + even * sin)
    return out

  def stored(self, kv):
    """A key-value vector as the cache keeps it."""
    kv = np.concatenate([self.qdq8(kv[: -self.rope_dim], 64), kv[-self.rope_dim :]])
    return kv if self.kv_bits is None else self.r(numerics.fake_quantize(kv, self.kv_bits))

  def attend(self, q, keys, sinks):
    scale = self.number(self.c["head_dim"] ** -0.5)
    scores = self.hf(self.hf(self.ops.dot(q, keys)) * scale)
    if self.rounding != "reference":
      p = self.ops.softmax(np.concatenate([scores, sinks[:, None]], axis=1))[:, :-1]
      return self.r(self.ops.dot(self.r(p), keys.T))
    top = scores.max(axis=1)
    e = self.ops.exp(scores - top[:, None])
    total = self.ops.sum(e) + self.ops.exp(sinks - top)
    return self.r(self.ops.dot(self.r(e), keys.T) / total[:, None])

  def compressed(self, layer, x, q_rank):
    """The compressed entries that the token reads, in their order."""
    state = self.compressors[layer]
    if state is None:
      return []
    self.compress(layer, "compressor.", state, x, self.stored)
    if not self.is_csa(layer):
      return state.entries
    index = self.indexers[layer]
    self.compress(layer, "indexer.compressor.", index, x, self.index_form)
    picks = self.pick(layer, x, q_rank, index.entries)
    self.note(picks=picks)
    return [state.entries[i] for i in picks]

  # Section 2.4, with the state of section 4.

  def compress(self, layer, name, state, x, stored):
    prefix, m, p = f"layers.{layer}.attn.{name}", self.ratio(layer), self.position
    row = p % m - m  # from the end: CSA keeps the previous window before the current one
    state.values[row] = self.hf(self.ops.dot(x, self.w[prefix + "wkv.weight"]))
    gate = self.hf(self.ops.dot(x, self.w[prefix + "wgate.weight"]))
    state.scores[row] = gate + self.w[prefix + "ape"][p % m]
    if (p + 1) % m:
      return
    values, scores = state.values, state.scores
    if self.is_csa(layer):  # channels "a" of the previous window, channels "b" of this one
      width = values.shape[1] // 2
      values, scores = (np.concatenate([s[:m, :width], s[m:, width:]]) for s in (values, scores))
    entry = self.norm(self.pool(values, scores), prefix + "norm")
    state.entries.append(stored(self.rotate(layer, entry, p + 1 - m)))
    if self.is_csa(layer):
      for rows in (state.values, state.scores):
        rows[:m] = rows[m:]

  def pool(self, values, scores):
    """Σ softmax(scores) · values per channel over the slots: [slots, C] → [C]."""
    weights = self.ops.softmax(np.ascontiguousarray(scores.T))
    return self.r(self.ops.sum(self.hf(self.hf(weights) * values.T)))

  # Section 2.5.

  def index_form(self, x):
    """Hadamard, then QDQ4; transformers has neither."""
    if self.rounding != "reference":
      return x
    x = self.r(hadamard(x) * self.number(x.shape[-1] ** -0.5))
    return self.r(numerics.qdq_fp4(x, min(32, x.shape[-1]))) if self.qdq else x

  def pick(self, layer, x, q_rank, entries):
    """The visible entries with the best scores, best first."""
    c, prefix = self.c, f"layers.{layer}.attn.indexer."
    if not entries:
      return []
    q = self.linear(q_rank, prefix + "wq_b").reshape(-1, c["index_head_dim"])
    q = self.index_form(self.rotate(layer, q, self.position))
    weights = self.r(self.ops.dot(x, self.w[prefix + "weights_proj.weight"]))
    relu = np.maximum(self.ref(self.ops.dot(np.stack(entries), q)), self.number(0))
    by_width, by_heads = (c[name] ** -0.5 for name in ("index_head_dim", "index_n_heads"))
    if self.rounding == "reference":
      scores = self.r(
        self.ops.sum(self.r(relu * self.r(weights * self.number(by_width * by_heads))))
      )
    else:
      scores = self.ops.sum((relu * self.number(by_width)) * (weights * self.number(by_heads)))
    return first_best(scores, c["index_topk"])

  # Section 3.

  def route(self, layer, x, token):
    """(experts in slot order, their weights)."""
    c, ops, prefix = self.c, self.ops, f"layers.{layer}.ffn.gate."
    logits = self.hf(ops.dot(x, self.w[prefix + "weight"]))
    if self.rounding == "hf":
      scores = self.r(np.sqrt(self.r(ops.softplus(logits))))
    else:
      scores = ops.sqrt_softplus(logits)
    margin, tie, count = np.nan, False, c["num_experts_per_tok"]
    if prefix + "tid2eid" in self.w:
      slots = self.w[prefix + "tid2eid"][token]
    else:
      biased = scores + self.w[prefix + "bias"]
      best = first_best(biased, count + 1)
      slots, margin = np.array(best[:count]), biased[best[-2]] - biased[best[-1]]
      tie = margin == 0
    total = self.number(0)
    for score in scores[slots]:
      total = total + score
    weights = self.hf(scores[slots] / self.hf(self.hf(total) + self.number(1e-20)))
    weights = self.hf(weights * self.number(c["routed_scaling_factor"]))
    order = np.argsort(slots)
    ranks = np.argsort(order)
    self.note(router_logits=logits, ids=slots[order], weights=weights[order], slots=ranks)
    self.note(margins=margin, ties=tie)
    return slots, weights

  def activate(self, x, prefix):
    """silu(min(gate, limit)) · clip(up), unrounded."""
    limit = self.number(self.c["swiglu_limit"])
    gate = np.minimum(self.linear(x, prefix + "w1"), limit)
    up = np.clip(self.linear(x, prefix + "w3"), -limit, limit)
    return self.hf(self.ops.silu(gate)) * up

  def moe(self, layer, x, token):
    """Release: gate before w2, C by ascending id, shared inside. Transformers: after, C by slot."""
    prefix = f"layers.{layer}.ffn."
    slots, weights = self.route(layer, x, token)
    before = self.rounding == "reference"
    order = np.argsort(slots) if before else range(len(slots))
    terms, total = {}, np.zeros_like(x)
    for slot in order:
      expert = f"{prefix}experts.{slots[slot]}."
      a = self.activate(x, expert)
      a = self.qdq8(self.r(a * weights[slot] if before else a), 128)
      output = self.ops.dot(a, self.w[expert + "w2.weight"])
      terms[slots[slot]] = output if before else self.r(output) * weights[slot]
      total = total + self.r(terms[slots[slot]])
    shared = self.r(self.activate(x, prefix + "shared_experts."))
    shared = self.linear(shared, prefix + "shared_experts.w2")
    out = self.r(self.hf(total) + shared)
    terms = np.stack([terms[expert] for expert in sorted(terms)])
    self.note(terms=terms, routed=total, shared=shared, combined=out)
    return out

  def state(self):
    """Every tensor of section 4 by the names of `moejax.models.export`, in canonical order."""
    out = {}
    for layer, window in enumerate(self.windows):
      out[f"layers.{layer}.window"] = window.copy()
      for name, kept in (("compressor", self.compressors), ("indexer", self.indexers)):
        state = kept[layer]
        if state is not None:
          width = state.values.shape[1] // (2 if self.is_csa(layer) else 1)
          entries = np.array(state.entries, self.ops.dtype).reshape(-1, width)
          parts = dict(entries=entries, values=state.values.copy(), scores=state.scores.copy())
          out |= {f"layers.{layer}.{name}.{part}": value for part, value in parts.items()}
    return out
