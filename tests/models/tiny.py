"""Tiny random models of every family and their compiled calls, shared by all tests of a session.

Compiling is what these tests cost, so calls keep to few shapes: one row and CHUNK tokens, two rows
and CHUNK tokens with every part of an execution present (`fork`), BATCH rows and TOKENS tokens; and
to one selection of taps (TAPS). Weights are drawn with
nothing at zero or one, so that no bias, sink or norm can be lost unseen.

As a program (`python -m tests.models.tiny family ...`) it prints `digest` of each family, computed
on as many devices as XLA_FLAGS asks for.
"""

import dataclasses
import functools
import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import ml_dtypes
import numpy as np

from moejax.models import (
  Config,
  config_from_hf,
  Delta,
  Execution,
  export,
  family_of,
  Mode,
  Model,
  NATIVE,
  PersistentState,
  Pins,
  Taps,
)
from moejax.models.execution import DEFAULT
from moejax.models.parameters import parameter_dtype
from tests.oracles import bits

_EVERY = dict(
  vocab_size=61,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  num_experts_per_tok=5,
  max_position_embeddings=256,
)

_DEEPSEEK_V4 = dict(
  _EVERY,
  model_type="deepseek_v4",
  num_hidden_layers=4,  # window, hash; CSA, hash; HCA, top-k; CSA, top-k
  num_key_value_heads=1,
  num_hash_layers=2,
  layer_types=[
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
  ],
  compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
  sliding_window=8,
  head_dim=16,
  qk_rope_head_dim=8,
  q_lora_rank=24,
  o_groups=2,
  o_lora_rank=12,
  n_routed_experts=11,
  n_shared_experts=1,
  moe_intermediate_size=16,
  norm_topk_prob=True,
  routed_scaling_factor=1.5,
  swiglu_limit=0.75,  # small enough to clamp
  hc_mult=4,
  hc_sinkhorn_iters=20,
  hc_eps=1e-6,
  index_n_heads=8,
  index_head_dim=16,
  index_topk=3,  # of up to five entries
  rope_theta=10000.0,
  compress_rope_theta=160000.0,
  rope_scaling=dict(
    type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=512
  ),
)

FIELDS: dict[str, dict[str, Any]] = {
  "olmoe": dict(
    _EVERY, model_type="olmoe", num_experts=11, intermediate_size=24, norm_topk_prob=False
  ),
  "qwen2_moe": dict(
    _EVERY,
    model_type="qwen2_moe",
    num_experts=11,
    intermediate_size=40,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    norm_topk_prob=False,
  ),
  "qwen3_moe": dict(
    _EVERY,
    model_type="qwen3_moe",
    head_dim=12,
    num_experts=11,
    intermediate_size=40,
    moe_intermediate_size=24,
    norm_topk_prob=True,
  ),
  "mixtral": dict(
    _EVERY, model_type="mixtral", num_local_experts=8, num_experts_per_tok=3, intermediate_size=24
  ),
  "deepseek": dict(
    _EVERY,
    model_type="deepseek",
    first_k_dense_replace=1,
    intermediate_size=40,
    moe_intermediate_size=24,
    n_routed_experts=11,
    n_shared_experts=2,
    norm_topk_prob=True,
  ),
  "deepseek_v4": _DEEPSEEK_V4,
}
FAMILIES = tuple(FIELDS)

LENGTH, CAPACITY = 24, 64  # positions of a state; of another, of the same content
FORK = 14  # position at which executions set in, one chunk before the end
TOKENS = 21  # CSA closes five windows in them, HCA two, and the ring turns more than twice
CHUNK = 7  # tokens of most compiled calls
BATCH = 64  # rows of a compiled call of TOKENS

# All that is traced, but fingerprints: they compile as long as the model.
TAPS = dataclasses.replace(
  Taps.routes(), terms=True, routed=True, shared=True, combined=True, post_block=True
)
TAPS = dataclasses.replace(TAPS, nan_experts=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Tiny:
  """A model with its parameters; `eq` by identity, as one of each is made."""

  config: Config
  module: Model
  params: dict[str, Any]

  @property
  def moe_layers(self) -> list[int]:
    return list(self.config.moe_layers)

  @property
  def top_k_layers(self) -> list[int]:
    """MoE layers whose router decides."""
    return [i for i in self.moe_layers if i not in getattr(self.config, "hash_layers", ())]


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run returned, on the host: logits [B, T, V], traced names → [L, B, T, ...]."""

  logits: np.ndarray
  state: PersistentState
  trace: dict[str, np.ndarray]

  def rows(self, index) -> "Result":
    """Some rows of the batch: a slice or integers."""
    trace = {name: value[:, index] for name, value in self.trace.items()}
    return Result(self.logits[index], self.state.rows(index), trace)

  def tokens(self, stop: int, start: int = 0) -> "Result":
    """Some tokens; the state stays what it was at the end."""
    trace = {name: value[:, :, start:stop] for name, value in self.trace.items()}
    return Result(self.logits[:, start:stop], self.state, trace)


@functools.cache
def tiny(family: str) -> Tiny:
  """The tiny model of a family, BF16 weights."""
  config = config_from_hf(FIELDS[family])
  return Tiny(config, family_of(config)(config), draw(config))


def draw(config: Config, dtype: str = "bfloat16", seed: int = 0):
  """Random parameters of a config, {"params": ...}."""
  params: dict[str, Any] = {}
  rng = np.random.default_rng(seed)
  for tensor in family_of(config).tensors(config):
    node = params
    for key in tensor.path[:-1]:
      node = node.setdefault(key, {})
    value = _draw(rng, tensor.path[-1], tensor.shape, config.num_experts)
    if tensor.dtype != "int32":  # BF16 values everywhere, whatever they are kept in
      value = value.astype(ml_dtypes.bfloat16)
    node[tensor.path[-1]] = jnp.asarray(value.astype(parameter_dtype(tensor, dtype)))
  return {"params": params}


def _draw(rng, name: str, shape, num_experts: int):
  if name == "hash_table":
    return np.argsort(rng.random((shape[0], num_experts)), axis=1)[:, : shape[1]]
  x = rng.standard_normal(shape)
  if name.endswith("norm"):
    return 1 + 0.2 * x
  if name == "scale":
    return 0.5 + 0.1 * x
  if name == "router_bias":
    return 0.1 * x
  if name.endswith("bias") or name in ("sinks", "base"):
    return 0.3 * x
  return x if name == "embed" else x * 1.6 / np.sqrt(shape[-2])


def with_params(model: Tiny, change) -> Tiny:
  """The model with change(path, value) in place of each parameter, paths joined by dots."""
  named = lambda path, x: change(".".join(entry.key for entry in path[1:]), x)
  return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(named, model.params))


@functools.cache
def draw_tokens(batch: int, time: int = TOKENS, seed: int = 0) -> np.ndarray:
  """int32 [B, T]."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, _EVERY["vocab_size"], (batch, time)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("mode", "taps"))
def _apply(module, params, tokens, state, execution, *, mode, taps):
  return module.apply(params, tokens, state, execution, mode=mode, taps=taps)


def call(
  model: Tiny, tokens, state, execution: Execution = NATIVE, mode: Mode = DEFAULT, taps: Taps = TAPS
) -> Result:
  """One compiled call."""
  tokens = jnp.asarray(tokens, jnp.int32)
  out = _apply(model.module, model.params, tokens, state, execution, mode=mode, taps=taps)
  return Result(*jax.device_get(out))


def run(model: Tiny, tokens, chunk: int, state=None, mode: Mode = DEFAULT, between=None) -> Result:
  """Tokens [B, T] from a state, an empty one by default, chunk by chunk.

  Args:
    model: to run.
    tokens: int32 [B, T].
    chunk: tokens per call.
    state: to start from.
    mode: of the run.
    between: function of the state, applied before each call.
  """
  if state is None:
    state = model.module.init_state(len(tokens), LENGTH, mode)
  parts = []
  for at in range(0, tokens.shape[1], chunk):
    state = between(state) if between else state
    parts.append(call(model, tokens[:, at : at + chunk], state, mode=mode))
    state = parts[-1].state
  return join(parts)


def alone(model: Tiny, tokens) -> Result:
  """One row [T] of any length by chunks of CHUNK, the last one padded."""
  padded = np.pad(tokens, (0, -len(tokens) % CHUNK), constant_values=-1)
  return run(model, padded[None], CHUNK).tokens(len(tokens))


def join(parts: list[Result]) -> Result:
  """Consecutive calls as one."""
  trace = {name: np.concatenate([p.trace[name] for p in parts], axis=2) for name in parts[0].trace}
  return Result(np.concatenate([p.logits for p in parts], axis=1), parts[-1].state, trace)


def quantised_mode(model: Tiny) -> Mode:
  """With the activation quantiser that the family has, for a strength to turn on."""
  qdq = model.config.has_activation_quantization
  return Mode(activations="qdq" if qdq else "int8")


def neutral(model: Tiny, batch: int, time: int) -> Execution:
  """The native run with every part of the execution present, none of which does anything."""
  c = model.config
  shape, streams = (c.num_layers, batch, time), getattr(c, "hc_mult", None)
  width = (c.hidden_size,) if streams is None else (streams, c.hidden_size)
  zeros = lambda *tail, dtype=jnp.int32: jnp.zeros((*shape, *tail), dtype)
  return Execution(
    codes=zeros() - 1,
    orders=zeros(c.top_k) - 1,
    pins=Pins(
      ids=zeros(c.top_k),
      weights=zeros(c.top_k, dtype=jnp.float32) + 7,
      slots=zeros(c.top_k),
      mask=zeros(dtype=bool),
    ),
    delta=Delta(jnp.int32(0), jnp.int32(0), jnp.zeros((batch, *width), jnp.uint32)),
    kv_bits=zeros() + 4,
    kv_strength=zeros(dtype=jnp.float32),
    activation_strength=zeros(dtype=jnp.float32),
    softening=zeros(dtype=jnp.float32),
    expert_mask=jnp.ones((*shape, c.num_experts), bool),
  )


def ragged() -> tuple[np.ndarray, list[np.ndarray]]:
  """Where each row of `draw_tokens(BATCH)` is cut, [BATCH], and the two padded calls it falls into.

  The first rows have nothing in the first call, nothing in the second, and one token in the first.
  """
  tokens, column = draw_tokens(BATCH), np.arange(TOKENS)[None]
  cuts = np.random.default_rng(1).integers(0, TOKENS + 1, BATCH)
  cuts[:3] = 0, TOKENS, 1
  at = cuts[:, None]
  rest = np.take_along_axis(tokens, np.minimum(column + at, TOKENS - 1), axis=1)
  return cuts, [np.where(column < at, tokens, -1), np.where(column < TOKENS - at, rest, -1)]


@functools.cache
def prefilled(model: Tiny) -> Result:
  """All of `draw_tokens(BATCH)` in one call."""
  return call(model, draw_tokens(BATCH), model.module.init_state(BATCH, LENGTH))


@functools.cache
def before_fork(model: Tiny) -> PersistentState:
  """Of two rows, at position FORK."""
  state, tokens = model.module.init_state(2, CAPACITY), draw_tokens(BATCH)[:2]
  for piece in np.split(tokens[:, :FORK], FORK // CHUNK, axis=1):
    state = call(model, piece, state, neutral(model, *piece.shape), quantised_mode(model)).state
  return state


def fork(model: Tiny, **parts) -> Result:
  """Two rows from position FORK on, with parts of the neutral execution replaced."""
  tokens = draw_tokens(BATCH)[:2, FORK:]
  execution = neutral(model, *tokens.shape).replace(**parts)
  return call(model, tokens, before_fork(model), execution, quantised_mode(model))


@functools.cache
def native_fork(model: Tiny) -> Result:
  """`fork` without replacing anything."""
  return fork(model)


# uint32 [L, B, 4] of a state.
state_fingerprints = jax.jit(lambda state: state.fingerprints())


def contents(result: Result) -> dict[str, np.ndarray]:
  """Everything in a result by name: logits, taps, and the exports of every row."""
  out = {"logits": result.logits, **result.trace}
  for row in range(len(result.state.position)):
    out |= {f"{row}.{name}": x for name, x in export(result.state, row).items()}
  return out


def differences(one: Result, other: Result) -> list[str]:
  """The names under which two results have different bits."""
  a, b = contents(one), contents(other)
  assert a.keys() == b.keys()
  same = lambda x, y: x.shape == y.shape and np.array_equal(bits(x), bits(y))
  return [name for name in a if not same(a[name], b[name])]


def digest(model: Tiny, devices=None) -> str:
  """SHA-256 of all bits of the `ragged` calls; with devices, each has some of the rows."""
  step = functools.partial(call, model) if devices is None else _sharded(model, devices)
  state, sha = model.module.init_state(BATCH, LENGTH), hashlib.sha256()
  for tokens in ragged()[1]:
    result = step(tokens, state)
    state = result.state
    for value in (result.logits, *result.trace.values()):
      sha.update(np.where(value == value, value, np.nan).astype(value.dtype).tobytes())
  for value in jax.tree.leaves(state):
    sha.update(np.asarray(value).tobytes())
  return sha.hexdigest()


def _sharded(model, devices):
  rows, second = PartitionSpec("rows"), PartitionSpec(None, "rows")
  apply = jax.shard_map(
    lambda params, tokens, state: model.module.apply(params, tokens, state, taps=TAPS),
    mesh=Mesh(np.array(devices), ("rows",)),
    in_specs=(PartitionSpec(), rows, rows),
    out_specs=(rows, rows, second),
    check_vma=False,
  )
  apply = jax.jit(apply)

  def step(tokens, state):
    return Result(*jax.device_get(apply(model.params, jnp.asarray(tokens), state)))

  return step


def main(families) -> None:
  devices = jax.devices() if len(jax.devices()) > 1 else None
  print(json.dumps({family: digest(tiny(family), devices) for family in families}))


if __name__ == "__main__":
  main(sys.argv[1:])
