"""Disturbances of a computation as values: what is quantised, or summed in another way.

Each is a record with two methods. `condition` says how the disturbed run computes, `idle` is the
same program at the setting that does nothing, the control of the route study; None where there is
no such setting.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from moejax import combine, numerics
from moejax.inference.forward import LoadedModel
from moejax.inference.routed import Condition
from moejax.models import Execution, Mode, PackedFormat


class Disturbance(Protocol):
  """Something to do to runs of `rows` sequences of `time` tokens under the mode of the study."""

  @property
  def name(self) -> str:
    """As tables have it."""

  def condition(self, model: LoadedModel, mode: Mode, rows: int, time: int) -> Condition:
    """The disturbed run."""

  def idle(self, model: LoadedModel, mode: Mode, rows: int, time: int) -> Condition | None:
    """The control."""


@dataclasses.dataclass(frozen=True)
class KvQuantization:
  """The simulated KV quantiser of the route study, section 1.

  Attributes:
    bits: 2 to 8.
    strength: 0 is off, 1 is the whole quantiser.
  """

  bits: int = 4
  strength: float = 1.0

  def __post_init__(self):
    if self.bits not in range(2, 9):
      raise ValueError(f"a KV cache of {self.bits} bits: expected 2 to 8.")
    if not 0 <= self.strength <= 1:
      raise ValueError(f"the strength is {self.strength}, expected 0 to 1.")

  @property
  def name(self) -> str:
    return f"kv{self.bits}" + ("" if self.strength == 1 else f" x{self.strength:g}")

  def condition(self, model, mode, rows, time):
    return self._at(mode, self.strength)

  def idle(self, model, mode, rows, time):
    return self._at(mode, 0.0)

  def _at(self, mode: Mode, strength: float) -> Condition:
    bits, strength = np.int32(self.bits), np.float32(strength)
    return Condition(mode, Execution(kv_bits=bits, kv_strength=strength))


@dataclasses.dataclass(frozen=True)
class PackedKv:
  """A real cache of few bits, packed on write and dequantised on read; it has no idle setting.

  Attributes:
    bits, window, prefill: see `PackedFormat`.
  """

  bits: int = 4
  window: int = 0
  prefill: int = 64

  @property
  def name(self) -> str:
    return f"int{self.bits}" + (f" window {self.window}" if self.window else "")

  def condition(self, model, mode, rows, time):
    packed = PackedFormat(self.bits, window=self.window, prefill=self.prefill)
    return Condition(dataclasses.replace(mode, packed_kv=packed))

  def idle(self, model, mode, rows, time):
    return None


@dataclasses.dataclass(frozen=True)
class ActivationQuantization:
  """Inputs of linear layers in INT8, symmetric per token: a near-null control."""

  @property
  def name(self) -> str:
    return "int8 activations"

  def condition(self, model, mode, rows, time):
    return self._at(mode, 1.0)

  def idle(self, model, mode, rows, time):
    return self._at(mode, 0.0)

  def _at(self, mode: Mode, strength: float) -> Condition:
    execution = Execution(activation_strength=np.full((1, 1, 1), strength, np.float32))
    return Condition(dataclasses.replace(mode, activations="int8"), execution)


@dataclasses.dataclass(frozen=True)
class WeightQuantization:
  """Round-to-nearest quantisation of the routed experts' matrices.

  Attributes:
    bits: 2 to 8.
    group: inputs that share a scale; None is a whole output row.
  """

  bits: int = 4
  group: int | None = None

  @property
  def name(self) -> str:
    return f"w{self.bits} " + (f"groups of {self.group}" if self.group else "rows")

  def condition(self, model, mode, rows, time):
    return Condition(mode, params=quantize_experts(model.params, self.bits, self.group))

  def idle(self, model, mode, rows, time):
    return Condition(mode, params=quantize_experts(model.params, self.bits, self.group, 0.0))


def quantize_experts(params, bits: int, group: int | None = None, strength: float = 1.0):
  """Parameters with the routed experts on a symmetric grid, rounded to the dtype they have.

  Raises:
    ValueError: a group that does not divide the inputs of an expert's matrix.
  """

  def one(path, x):
    if not any(getattr(key, "key", None) == "experts" for key in path):
      return x
    # Matrices are [E, inputs, outputs].
    x32 = x.astype(jnp.float32)
    return numerics.fake_quantize(x32, bits, axis=1, group=group, strength=strength).astype(x.dtype)

  return jax.tree_util.tree_map_with_path(one, params)


@dataclasses.dataclass(frozen=True)
class Reduction:
  """Another combine contract, every layer of every sequence in a fixed random order of its own.

  Attributes:
    scheme: the contract.
    seed: of the orders; sequence b has those of request b.
  """

  scheme: combine.Contract
  seed: int = 0

  @property
  def name(self) -> str:
    return f"contract {self.scheme.name}"

  def condition(self, model, mode, rows, time):
    c = model.config
    orders = [combine.schedule(self.seed, row, c.num_layers, c.top_k) for row in range(rows)]
    orders = np.stack(orders, axis=1)[:, :, None].astype(np.int32)
    return Condition(mode, Execution(codes=np.int32(self.scheme.code), orders=orders))

  def idle(self, model, mode, rows, time):
    native = model.module.contract(mode).code
    return Condition(mode, Execution(codes=np.int32(native)))


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
  """A pair of conditions that no record describes.

  Attributes:
    name: as tables have it.
    disturbed, control: as `Disturbance`.
  """

  name: str
  disturbed: Condition
  control: Condition | None = None

  def condition(self, model, mode, rows, time):
    return self.disturbed

  def idle(self, model, mode, rows, time):
    return self.control
