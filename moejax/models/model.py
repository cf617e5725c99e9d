"""What every family is: a flax.linen module over explicit state, and its place in files."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine import Contract
from moejax.models.config import Config, Fields
from moejax.models.execution import DEFAULT, Execution, Mode, Taps
from moejax.models.run import Run
from moejax.models.state import PersistentState
from moejax.models.tensors import Tensor
from moejax.numerics import fingerprint


class Model(nn.Module):
  """A decoder language model.

      logits, state, trace = model.apply(params, tokens, state, execution, mode=mode, taps=taps)

  tokens are int32 [B, T], any T ≥ 1: prefill, chunk and decode are one function and the state knows
  the position. A negative token is padding, allowed at the end of a row only. Logits are float32
  [B, T, V]; the trace maps names of `Taps` to arrays. Everything is an argument, nothing is kept.

  Subclasses are families; each is one file.
  """

  config: Config

  @staticmethod
  def read_config(fields: Fields) -> Config:
    """The record of a config.json."""
    raise NotImplementedError

  @staticmethod
  def write_config(config: Config) -> dict[str, Any]:
    """A config.json that `read_config` and transformers read."""
    raise NotImplementedError

  @staticmethod
  def tensors(config: Config) -> list[Tensor]:
    """Every parameter and its place in a checkpoint."""
    raise NotImplementedError

  def contract(self, mode: Mode) -> Contract:
    """How the family's code, or transformers' eager experts, sum the experts."""
    raise NotImplementedError

  def close_block(self, mode: Mode, closing, output):
    """The state after a block whose MoE layer gave another output; the end of every block.

    Args:
      mode: static choices.
      closing: as traced, [..., D] or [..., hc, D + 1].
      output: [..., D], of the MoE layer.

    Returns:
      float32 [..., D] or [..., hc, D].
    """
    raise NotImplementedError

  def layer_state(self, layer: int, batch: int, length: int, mode: Mode) -> Any:
    """The empty cache of one layer."""
    raise NotImplementedError

  def init_state(self, batch: int, length: int, mode: Mode = DEFAULT) -> PersistentState:
    """An empty state for `batch` rows of at most `length` positions."""
    if batch < 1 or length < 1:
      raise ValueError(f"init_state: batch and length must be at least 1, got {batch}, {length}.")
    layers = tuple(
      self.layer_state(layer, batch, length, mode) for layer in range(self.config.num_layers)
    )
    return PersistentState(jnp.zeros(batch, jnp.int32), layers, length)

  def start(self, tokens, state, execution: Execution, mode: Mode, taps: Taps) -> Run:
    """The run of one call; refuses arguments that do not fit."""
    if tokens.ndim != 2 or tokens.dtype != jnp.int32 or tokens.shape[1] < 1:
      raise ValueError(f"tokens must be int32 [B, T], T ≥ 1, got {tokens.dtype} {tokens.shape}.")
    self._check_state(state, tokens.shape[0], mode)
    if mode.activations == "qdq" and not self.config.has_activation_quantization:
      raise ValueError(f"mode: activations 'qdq' is not a rule of {self.config.family}.")
    return Run(mode, taps, execution, tokens, state.position, state.length)

  def _check_state(self, state: PersistentState, batch: int, mode: Mode) -> None:
    want = jax.eval_shape(lambda: self.init_state(batch, state.length, mode))
    found, expected = jax.tree.flatten(state), jax.tree.flatten(want)
    if found[1] == expected[1]:
      pairs = list(zip(found[0], expected[0]))
      wrong = [(a, b) for a, b in pairs if (a.shape, a.dtype) != (b.shape, b.dtype)]
      if not wrong:
        return
      a, b = wrong[0]
      detail = f"{a.dtype} {a.shape} where {b.dtype} {b.shape} is expected"
    else:
      detail = "other layers"
    raise ValueError(f"the state is of another config, batch or mode: it has {detail}.")

  @nn.nowrap
  def run_blocks(self, run: Run, x, state: PersistentState, block: Callable):
    """Applies block(layer, run of the layer, x, cache) → (x, cache, trace entries) in turn.

    Returns:
      (x, state after the call, trace).
    """
    c = self.config
    caches, traces = [], []
    for layer in range(c.num_layers):
      at = run.at_layer(layer, c.num_layers, c.top_k, c.num_experts)
      x, cache, trace = block(layer, at, x, state.layers[layer])
      if run.taps.block_fingerprints:
        trace["block_fingerprints"] = stream_fingerprint(trace["post_block"])
      caches.append(cache)
      traces.append(run.taps.select(trace))
    state = state.replace(position=run.end, layers=tuple(caches))
    trace = _stack(traces)
    if run.taps.state_fingerprints:
      trace["state_fingerprints"] = state.fingerprints()
    return x, state, trace


def stream_fingerprint(x):
  """[B, T, ...] → uint32 [B, T, 4]."""
  return fingerprint(x.reshape(*x.shape[:2], -1))


def _stack(traces: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
  """Per-layer entries as arrays [L, ...]; layers without an entry are 0, ids and experts -1."""
  out = {}
  for name in sorted({name for trace in traces for name in trace}):
    some = next(trace[name] for trace in traces if name in trace)
    missing = np.array(-1 if name in ("ids", "nan_experts") else 0, some.dtype)
    out[name] = jnp.stack([trace.get(name, jnp.full_like(some, missing)) for trace in traces])
  return out
