"""What is asked of one forward pass: arrays that change its values, and static choices.

`Execution` is a pytree of arrays, so that `vmap`, `jit` and stacking work over every part of it and
a sweep is a stack of executions. `Mode` holds what must be static; `Taps` says what to return. The
defaults are the native run in canonical arithmetic with nothing traced.

Indices: L decoder layers (dense ones included, their entries unused), B rows, T tokens of the call,
K selected experts, E experts, D hidden size.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine.contract import NUM_CODES

_MODES = {
  "arithmetic": ("canonical", "fast"),
  "rounding": ("reference", "hf", "float32"),
  "contract": ("native", "eager"),
  "activations": ("none", "qdq", "int8"),
  "router_dtype": (None, "float32", "bfloat16"),
}


_FLOATS = ("kv_strength", "activation_strength", "softening")


@dataclasses.dataclass(frozen=True)
class PackedFormat:
  """A cache that holds codes of few bits, quantised as tokens are written, read back as BF16.

  Attributes:
    bits: of a code, 2 to 4.
    group: channels of one head and token that share a scale and a zero point; a head that has
      fewer is one group.
    window: 0: every token is read as its codes, by itself too. Otherwise the newest tokens are read
      as they were, until so many have come together behind the prefill and are flushed; the prefill
      is read exactly while it lasts. As a quantised cache of transformers, but flushed tokens are
      not quantised again.
    prefill: tokens of the prefill, for the times of flushes.
  """

  bits: int = 4
  group: int = 64
  window: int = 0
  prefill: int = 0

  def __post_init__(self):
    if self.bits not in (2, 3, 4):
      raise ValueError(f"a packed cache of {self.bits} bits: expected 2, 3 or 4.")
    if self.group < 1 or self.window < 0 or self.prefill < 0:
      raise ValueError(
        "a packed cache needs a group of at least 1, and neither a negative window nor prefill."
      )


@dataclasses.dataclass(frozen=True)
class Mode:
  """The static choices of a run, named in its record.

  Attributes:
    arithmetic: "canonical", whose bits do not depend on batch, chunking, threads or machine; or
      "fast", plain XLA, differentiable.
    rounding: where values are rounded to BF16: as the family's "reference" code does, as "hf"
      (transformers) does where that is another place, or nowhere ("float32", fast only).
    contract: the family's "native" expert contract, or that of transformers' "eager" experts.
    packed_kv: the packed form of the KV cache, or None for BF16.
    activations: simulated quantisation of the inputs of linear layers: "none"; "qdq", DeepSeek's
      FP8 and FP4 (DeepSeek-V4 only); "int8", symmetric per token.
    router_dtype: dtype of the router logits; None is the family's own.
  """

  arithmetic: str = "canonical"
  rounding: str = "reference"
  contract: str = "native"
  packed_kv: PackedFormat | None = None
  activations: str = "none"
  router_dtype: str | None = None

  def __post_init__(self):
    for field, choices in _MODES.items():
      if getattr(self, field) not in choices:
        wanted = ", ".join(map(str, choices))
        raise ValueError(f"mode: {field} must be one of {wanted}, got {getattr(self, field)!r}.")
    if self.rounding == "float32" and self.arithmetic == "canonical":
      raise ValueError("mode: float32 rounding needs fast arithmetic; canonical dots are BF16.")

  @property
  def dtype(self):
    """Of what a cache keeps where the model's values are BF16."""
    return jnp.float32 if self.rounding == "float32" else jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Taps:
  """What a forward pass returns beside logits and state; the rest costs nothing.

  Each is one array of the trace, with leading axes [L, B, T]; zero (ids: -1) at dense layers. The
  persistent state after the call needs no tap: it is the second result.

  Attributes:
    router_logits: float32 [E], in the router's dtype, before any score function.
    ids: int32 [K] selected experts, ascending; -1 for a padding token.
    weights: float32 [K], gates by ascending id.
    slots: int32 [K], the router's order: entry j is the position in `ids` of slot j.
    margins: float32, weakest selected minus strongest unselected (logit; DeepSeek-V4: biased
      score). NaN where a table decides.
    ties: bool, whether the last selected and the first unselected score are equal.
    terms: float32 [K, D], gates inside, by ascending id.
    routed: float32 [D], the accumulator before the shared merge.
    shared: float32 [D], the shared expert's output as it is merged.
    combined: float32 [D], the output of the MoE layer.
    closing: float32 [D], or [hc, D + 1]: what `Model.close_block` makes the state after the block
      of, with that output.
    post_block: float32 [D], or [hc, D] for hyper-connected streams: the state after the block.
    block_fingerprints: uint32 [4] of `post_block` (`numerics.fingerprint`).
    state_fingerprints: uint32 [4] of the layer's persistent state after the call, [L, B, 4].
    nan_experts: int32, the lowest selected expert with a NaN in its term, or -1.
    logits: the first of the call's tokens whose logits are wanted, or "last": that of each row.
  """

  router_logits: bool = False
  ids: bool = False
  weights: bool = False
  slots: bool = False
  margins: bool = False
  ties: bool = False
  terms: bool = False
  routed: bool = False
  shared: bool = False
  combined: bool = False
  closing: bool = False
  post_block: bool = False
  block_fingerprints: bool = False
  state_fingerprints: bool = False
  nan_experts: bool = False
  logits: int | str = 0

  def __post_init__(self):
    if self.logits != "last" and not (isinstance(self.logits, int) and self.logits >= 0):
      raise ValueError(f'taps: logits must be a token of the call or "last", got {self.logits!r}.')

  @classmethod
  def routes(cls, **more) -> "Taps":
    """Everything about routing: logits, ids, weights, slots, margins and ties."""
    names = ("router_logits", "ids", "weights", "slots", "margins", "ties")
    return cls(**dict.fromkeys(names, True), **more)

  def select(self, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The entries that were asked for."""
    return {name: value for name, value in values.items() if getattr(self, name)}


@struct.dataclass
class Pins:
  """Routes to use instead of the router's own, where the mask is true.

  Attributes:
    ids: int32, broadcastable to [L, B, T, K], ascending.
    weights: float32 like ids, used verbatim.
    slots: int32 like ids, as in `Taps.slots`.
    mask: bool, broadcastable to [L, B, T].
  """

  ids: jax.Array
  weights: jax.Array
  slots: jax.Array
  mask: jax.Array

  @classmethod
  def from_trace(cls, trace: dict[str, jax.Array], mask=True) -> "Pins":
    """Pins every token of a traced run (taps ids, weights, slots) to its routes."""
    return cls(trace["ids"], trace["weights"], trace["slots"], jnp.asarray(mask, bool))


@struct.dataclass
class Delta:
  """A change of the state after one block at one position.

  Attributes:
    layer: int32 scalar.
    position: int32 scalar, absolute.
    value: broadcastable to [B, D] ([B, hc, D] for streams). float32 is added, and -0.0 changes
      nothing; uint32 is XORed with the float32 bits, which is exact for every pattern.
  """

  layer: jax.Array
  position: jax.Array
  value: jax.Array


@struct.dataclass
class Execution:
  """The arrays of one run; None is the native behaviour.

  Attributes:
    codes: int32, broadcastable to [L, B, T], of `Contract.code`; -1 is native.
    orders: int32, broadcastable to [L, B, T, K], permutations of the terms by ascending id; a row
      that starts with -1 is native.
    pins: routes.
    delta: endpoint delta.
    kv_bits: int32, broadcastable to [L, B, T]: bits of the simulated KV quantiser, 2 to 8, as the
      token is written; 0 keeps its keys and values as they are.
    kv_strength: float32, broadcastable to [L, B, T], of that quantiser.
    activation_strength: the same for the activation quantiser of the mode.
    softening: float32, broadcastable to [L, B, T]. Where it is τ > 0 each selected weight is
      multiplied by clip((z - z') / τ, 0, 1), z its score and z' that of the strongest expert left
      out (the scores of margins); not renormalised, and not where a table decides.
    expert_mask: bool, broadcastable to [L, B, T, E]; an expert whose entry is false is not chosen.
      Where a table decides (hash layers), the table does.
  """

  codes: jax.Array | None = None
  orders: jax.Array | None = None
  pins: Pins | None = None
  delta: Delta | None = None
  kv_bits: jax.Array | None = None
  kv_strength: jax.Array | None = None
  activation_strength: jax.Array | None = None
  softening: jax.Array | None = None
  expert_mask: jax.Array | None = None

  def at_layer(self, layer: int, shape: tuple[int, int, int], top_k: int, num_experts: int):
    """The same record for one layer, leading axes broadcast to [B, T]. shape is (L, B, T)."""

    def rows(name, x, *tail, dtype):
      if x is None:
        return None
      x = jnp.asarray(x)
      if x.dtype != dtype:
        raise TypeError(f"execution: {name} must be {jnp.dtype(dtype).name}, got {x.dtype}.")
      target = (*shape, *tail)
      if x.ndim > len(target) or any(n not in (1, m) for n, m in zip(x.shape[::-1], target[::-1])):
        raise ValueError(f"execution: {name} {x.shape} does not broadcast to {target}.")
      return jnp.broadcast_to(x, target)[layer]

    pins = self.pins and Pins(
      ids=rows("pinned ids", self.pins.ids, top_k, dtype=jnp.int32),
      weights=rows("pinned weights", self.pins.weights, top_k, dtype=jnp.float32),
      slots=rows("pinned slots", self.pins.slots, top_k, dtype=jnp.int32),
      mask=rows("mask of pins", self.pins.mask, dtype=bool),
    )
    return self.replace(
      codes=rows("codes", self.codes, dtype=jnp.int32),
      orders=rows("orders", self.orders, top_k, dtype=jnp.int32),
      pins=pins,
      expert_mask=rows("expert_mask", self.expert_mask, num_experts, dtype=bool),
      kv_bits=rows("kv_bits", self.kv_bits, dtype=jnp.int32),
      **{name: rows(name, getattr(self, name), dtype=jnp.float32) for name in _FLOATS},
    )

  def take_tokens(self, index: np.ndarray) -> "Execution":
    """The record for some of the tokens it was made for, by index [n]; axes of 1 stay."""

    def cut(x, tail):
      axis = np.ndim(x) - 1 - tail
      if x is None or axis < 0 or x.shape[axis] == 1:
        return x
      if x.shape[axis] <= index.max():
        raise ValueError(f"execution: made for {x.shape[axis]} tokens, run on {index.max() + 1}.")
      return jnp.take(jnp.asarray(x), index, axis=axis)

    return self._map(cut)

  def rows(self, index: slice | np.ndarray) -> "Execution":
    """The record for some rows of the batch that it was made for; axes of 1 stay."""

    def cut(x, tail):
      axis = np.ndim(x) - 2 - tail
      if x is None or axis < 0 or x.shape[axis] == 1:
        return x
      return x[(slice(None),) * axis + (index,)]

    return self._map(cut)

  def _map(self, cut) -> "Execution":
    """With cut(part, axes after the token's) in place of every part but the delta."""
    pins = self.pins and Pins(
      *(cut(x, 1) for x in (self.pins.ids, self.pins.weights, self.pins.slots)),
      mask=cut(self.pins.mask, 0),
    )
    return self.replace(
      codes=cut(self.codes, 0),
      orders=cut(self.orders, 1),
      pins=pins,
      kv_bits=cut(self.kv_bits, 0),
      **{name: cut(getattr(self, name), 0) for name in _FLOATS},
      expert_mask=cut(self.expert_mask, 1),
    )

  def rows_alike(self) -> bool:
    """Whether no part has a batch axis, so that equal prompts run alike."""

    def alike(x, tail):
      axis = np.ndim(x) - 2 - tail
      return x is None or axis < 0 or x.shape[axis] == 1

    pins, delta = self.pins, self.delta
    whole = [self.codes, self.kv_bits, *(getattr(self, name) for name in _FLOATS)]
    whole.append(pins and pins.mask)
    by_expert = [self.orders, self.expert_mask]
    by_expert += [pins.ids, pins.weights, pins.slots] if pins else []
    same_delta = delta is None or np.ndim(delta.value) < 2 or delta.value.shape[0] == 1
    return same_delta and all(alike(x, 0) for x in whole) and all(alike(x, 1) for x in by_expert)

  def check(self, top_k: int, num_experts: int) -> None:
    """Refuses what can be seen to be wrong in concrete arrays; traced ones are passed."""

    def concrete(x):
      return None if x is None or isinstance(x, jax.core.Tracer) else np.asarray(x)

    codes, orders = concrete(self.codes), concrete(self.orders)
    if codes is not None and ((codes < -1) | (codes >= NUM_CODES)).any():
      raise ValueError(f"execution: a contract code is outside -1 .. {NUM_CODES - 1}.")
    if orders is not None:
      given = orders[orders[..., 0] != -1]
      if (np.sort(given, axis=-1) != np.arange(given.shape[-1])).any():
        raise ValueError(f"execution: an order is not a permutation of 0 .. {top_k - 1}, nor -1.")
    if self.pins is not None:
      ids = concrete(self.pins.ids)
      if ids is not None and ((ids < -1) | (ids >= num_experts)).any():
        raise ValueError(f"execution: a pinned id is outside 0 .. {num_experts - 1}.")
    bits = concrete(self.kv_bits)
    if bits is not None and ((bits != 0) & ((bits < 2) | (bits > 8))).any():
      raise ValueError("execution: kv_bits must be 2 to 8, or 0 for none.")
    mask = concrete(self.expert_mask)
    if mask is not None:
      left = np.broadcast_to(mask, (*mask.shape[:-1], num_experts)).sum(axis=-1).min()
      if left < top_k:
        raise ValueError(f"execution: expert_mask leaves {left} experts, fewer than {top_k}.")


DEFAULT = Mode()
NOTHING = Taps()
NATIVE = Execution()
