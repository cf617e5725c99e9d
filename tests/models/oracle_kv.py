"""OLMoE, Qwen1.5-MoE, Qwen3-MoE, DeepSeek-MoE and Mixtral in NumPy, one sequence, layer by layer.

Written from the published tensors and sections 2 to 5 of the families' page; of moejax only the
elementwise functions and softmax are used, whose bits under NumPy have tests of their own. The two
arithmetics here are also what `oracle_v4` is written over.
"""

import numpy as np

from moejax import numerics
from tests import oracles
from tests.oracles import to_bf16


def tree_sum(x):
  """[..., N] → [...]: padded with zeros to a power of two, then the second half onto the first."""
  width = 1
  while width < x.shape[-1]:
    width *= 2
  x = np.concatenate([x, np.zeros((*x.shape[:-1], width - x.shape[-1]), x.dtype)], axis=-1)
  while width > 1:
    width //= 2
    x = x[..., :width] + x[..., width:]
  return x[..., 0] + x.dtype.type(0)


class Canonical:
  """float32: every operation is rounded, sums of products run over k one by one from +0."""

  dtype = np.float32
  round = staticmethod(to_bf16)
  sum = staticmethod(tree_sum)
  exp = staticmethod(numerics.exp)
  sigmoid = staticmethod(numerics.sigmoid)
  silu = staticmethod(numerics.silu)
  softplus = staticmethod(numerics.softplus)
  sqrt_softplus = staticmethod(numerics.sqrt_softplus)
  softmax = staticmethod(numerics.softmax)

  @staticmethod
  def dot(x, w):
    """[..., K] × [N, K] → [..., N]."""
    return oracles.dot(x.reshape(-1, x.shape[-1]), w.T).reshape(*x.shape[:-1], len(w))


class Exact:
  """float64, nothing is rounded to BF16."""

  dtype = np.float64
  exp = staticmethod(np.exp)

  @staticmethod
  def round(x):
    return x

  @staticmethod
  def dot(x, w):
    return x @ w.T

  @staticmethod
  def sum(x):
    return x.sum(axis=-1)

  @staticmethod
  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  @staticmethod
  def silu(x):
    return x / (1 + np.exp(-x))

  @staticmethod
  def softplus(x):
    return np.log1p(np.exp(x))

  @staticmethod
  def sqrt_softplus(x):
    return np.sqrt(np.log1p(np.exp(x)))

  @staticmethod
  def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def root_mean_square(ops, x, eps):
  """√(mean(x²) + eps): [..., N] → [..., 1]."""
  mean = ops.sum(x * x) / ops.dtype(x.shape[-1])
  return np.sqrt(mean + ops.dtype(eps))[..., None]


def first_best(scores, count):
  """The ids of the largest scores [N], best first, the lowest id among equals."""
  return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def rotary_tables(positions, dim, theta, scale=lambda frequencies: frequencies):
  """Cosines and sines float64 [T, dim / 2] of float32 angles; `scale` changes the frequencies."""
  frequencies = scale(float(theta) ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
  angles = np.asarray(positions, np.float32)[:, None] * frequencies
  return np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))


class Decoder:
  """One sequence through the model of a config.json and its tensors, [out, in] as in files.

  Attributes:
    blocks: [L] of [T, D], the residual stream after each block.
    ids, weights: of each MoE layer [T, K], experts ascending and their gates.
    routed, combined: of each MoE layer [T, D], the routed sum before it is rounded, and the output.
    state: keys and values [heads, T, C] by the names of `moejax.models.export`.
  """

  def __init__(self, config, tensors, contract="native"):
    self.c, self.w, self.contract = config, tensors, contract
    self.family = config["model_type"]
    self.blocks, self.ids, self.weights, self.routed, self.combined = [], [], [], [], []
    self.state = {}

  def __call__(self, tokens):
    """int [T] → logits float32 [T, V]."""
    w, layers = self.w, range(self.c["num_hidden_layers"])
    x = w["model.embed_tokens.weight"][tokens]
    for layer in layers:
      prefix = f"model.layers.{layer}."
      x = to_bf16(x + self.attention(self.norm(x, prefix + "input_layernorm"), prefix))
      h = self.norm(x, prefix + "post_attention_layernorm")
      dense = prefix + "mlp.gate_proj.weight" in w
      x = to_bf16(x + (self.mlp(h, prefix + "mlp.") if dense else self.moe(h, prefix)))
      self.blocks.append(x)
    head = "model.embed_tokens" if self.c["tie_word_embeddings"] else "lm_head"
    return self.linear(self.norm(x, "model.norm"), head)

  def linear(self, x, name):
    """R(W x + b), one rounding."""
    out = Canonical.dot(x, self.w[name + ".weight"])
    if name + ".bias" in self.w:
      out = out + self.w[name + ".bias"]
    return to_bf16(out)

  def norm(self, x, name):
    """R(w · R(x / rms))."""
    normed = x / root_mean_square(Canonical, x, self.c["rms_norm_eps"])
    return to_bf16(self.w[name + ".weight"] * to_bf16(normed))

  def project(self, x, prefix):
    """q, k, v as [T, heads, C], before rotation."""
    c, size = self.c, self.head_size
    q, k, v = (self.linear(x, f"{prefix}{name}_proj") for name in "qkv")
    if self.family == "olmoe":
      q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
      if c["clip_qkv"] is not None:
        bound = to_bf16(c["clip_qkv"])
        q, k, v = (np.minimum(np.maximum(t, -bound), bound) for t in (q, k, v))
    q, k, v = (t.reshape(len(x), -1, size) for t in (q, k, v))
    if self.family == "qwen3_moe":
      q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
    return q, k, v

  @property
  def head_size(self):
    return self.c.get("head_dim") or self.c["hidden_size"] // self.c["num_attention_heads"]

  def rotate(self, x):
    """R(R(x · cos) + R(rot(x) · sin)), halves apart: [T, heads, C]."""
    theta = self.c.get("rope_theta") or self.c["rope_parameters"]["rope_theta"]
    tables = rotary_tables(range(len(x)), self.head_size, theta)
    cos, sin = (np.concatenate([t, t], axis=-1)[:, None] for t in map(to_bf16, tables))
    first, second = np.split(x, 2, axis=-1)
    turned = np.concatenate([-second, first], axis=-1)
    return to_bf16(to_bf16(x * cos) + to_bf16(turned * sin))

  def attention(self, x, prefix):
    """Each head and query apart; entries behind the query are not looked at."""
    prefix += "self_attn."
    q, k, v = self.project(x, prefix)
    q, k = self.rotate(q), self.rotate(k)
    for name, value in (("keys", k), ("values", v)):
      layer = prefix.removeprefix("model.").removesuffix("self_attn.")
      self.state[layer + name] = value.swapaxes(0, 1)
    group = q.shape[1] // k.shape[1]
    out = np.zeros_like(q)
    for t in range(len(x)):
      for head in range(q.shape[1]):
        keys, values = (y[: t + 1, head // group] for y in (k, v))
        scores = to_bf16(Canonical.dot(q[t, head], keys))
        p = to_bf16(Canonical.softmax(to_bf16(self.scale(scores))))
        out[t, head] = to_bf16(Canonical.dot(p, values.T))
    return self.linear(out.reshape(len(x), -1), prefix + "o_proj")

  def scale(self, scores):
    """DeepSeek-MoE divides by √C, the others multiply by C^-½."""
    if self.family == "deepseek":
      return scores / np.float32(np.sqrt(self.head_size))
    return scores * np.float32(self.head_size**-0.5)

  def mlp(self, x, prefix, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (prefix + name for name in names)
    hidden = to_bf16(Canonical.silu(self.linear(x, gate)))
    return self.linear(to_bf16(hidden * self.linear(x, up)), down)

  def moe(self, x, prefix):
    prefix += "block_sparse_moe." if self.family == "mixtral" else "mlp."
    routes = [self.route(logits) for logits in self.linear(x, prefix + "gate")]
    routed = np.stack([self.experts(x[t], *route, prefix) for t, route in enumerate(routes)])
    out = to_bf16(routed)
    if self.family == "qwen2_moe":
      gate = to_bf16(Canonical.sigmoid(self.linear(x, prefix + "shared_expert_gate")))
      out = to_bf16(out + to_bf16(gate * self.mlp(x, prefix + "shared_expert.")))
    if self.family == "deepseek" and self.c["n_shared_experts"]:
      out = to_bf16(out + self.mlp(x, prefix + "shared_experts."))
    orders = [np.argsort(ids) for ids, _ in routes]
    self.ids.append(np.stack([np.take(ids, o) for (ids, _), o in zip(routes, orders)]))
    self.weights.append(np.stack([gates[o] for (_, gates), o in zip(routes, orders)]))
    self.routed.append(routed)
    self.combined.append(out)
    return out

  def route(self, logits):
    """Logits [E] → (ids in slot order, gates float32 as the router gives them)."""
    deepseek, top_k = self.family == "deepseek", self.c["num_experts_per_tok"]
    scores = Canonical.softmax(logits)
    if deepseek:
      scores = to_bf16(scores)
    ids = first_best(scores, top_k)
    gates = scores[ids]
    if self.family == "mixtral" or (self.c["norm_topk_prob"] and top_k > 1):
      total = np.float32(0)
      for gate in gates:
        total = total + gate
      if deepseek:
        total = to_bf16(to_bf16(total) + np.float32(1e-20))
      gates = to_bf16(gates / total) if deepseek else gates / total
    return ids, gates

  def experts(self, x, ids, gates, prefix):
    """The routed sum of one token, [D].

    Terms: R(R(o) · R(g)); Mixtral keeps the gate, and its native sum keeps the product. Sums: in
    float32 over slots, or with a rounding at each addition over ascending ids.
    """
    mixtral = self.family == "mixtral"
    loop = self.contract == "eager" or self.family == "deepseek"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    total = np.zeros_like(x)
    for slot in np.argsort(ids) if loop else range(len(ids)):
      output = self.mlp(x, f"{prefix}experts.{ids[slot]}.", names)
      term = output * (gates[slot] if mixtral else to_bf16(gates[slot]))
      if loop or not mixtral:
        term = to_bf16(term)
      total = total + term
      if loop:
        total = to_bf16(total)
    return total
