"""The numeric contract of an expert combine, as one small value.

The four schemes of the reduction paper (section 2.5) and the exact reference differ in two fields:

    P32   float32 operands, float32 accumulator
    C     bfloat16 operands, float32 accumulator
    A     float32 operands, bfloat16 accumulator (rounded after every addition)
    B     bfloat16 operands, bfloat16 accumulator
    EXACT bfloat16 operands, the float32 rounding of their exact sum

The other fields say where the gate is multiplied, which order is the native one, how the operands
meet and how a shared expert joins; a runtime's own behaviour is such a record with all of them set.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from moejax.combine.topology import SEQUENTIAL, Topology
from moejax.numerics.bf16 import round_bf16

_CHOICES = {
  "operand": ("float32", "bfloat16"),
  "accumulator": ("float32", "bfloat16", "exact"),
  "gate_point": ("before_down", "accumulator", "after_down"),
  "gate_dtype": ("float32", "bfloat16"),
  "order": ("ascending_id", "slot"),
  "shared_merge": ("accumulator", "rounded"),
  "output": ("float32", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Contract:
  """How a runtime sums its experts.

  Attributes:
    name: for tables and errors.
    operand: dtype a term is rounded to before it is added.
    accumulator: dtype the running sum is rounded to after every addition, or "exact".
    gate_point: where the gate enters: into the activation before the down projection, on that
      projection's FP32 accumulator, or after its output was rounded. A field of the record, not of
      the sum: the expert function obeys it, and terms arrive with their gates inside.
    gate_dtype: dtype of the gate at that multiplication.
    order: the native order, ascending expert id or router slot.
    topology: how operands meet.
    shared_merge: whether the shared expert's output is added to the accumulator, before the one
      output rounding, or to the already rounded routed sum.
    output: dtype of the merged result.
  """

  name: str
  operand: str
  accumulator: str
  gate_point: str = "before_down"
  gate_dtype: str = "float32"
  order: str = "ascending_id"
  topology: Topology = SEQUENTIAL
  shared_merge: str = "accumulator"
  output: str = "bfloat16"

  def __post_init__(self):
    for field, choices in _CHOICES.items():
      value = getattr(self, field)
      if value not in choices:
        raise ValueError(
          f"contract {self.name!r}: {field} must be one of {', '.join(choices)}, got {value!r}."
        )

  @property
  def code(self) -> int:
    """Operand and accumulator as the kernels' per-row operand: bit 0, and the rest."""
    return (self.operand == "bfloat16") + 2 * _CHOICES["accumulator"].index(self.accumulator)

  @property
  def first_pair_commutes(self) -> bool:
    """Whether swapping the first two operands of a sequential sum can never change a bit.

    0 + x is exact and x + y = y + x, unless the first step rounds an operand that was not rounded.
    """
    return self.operand == "bfloat16" or self.accumulator != "bfloat16"

  def with_scheme(self, scheme: "Contract") -> "Contract":
    """This contract with only operand and accumulator precision replaced by the scheme's."""
    return dataclasses.replace(
      self,
      name=f"{self.name}/{scheme.name}",
      operand=scheme.operand,
      accumulator=scheme.accumulator,
    )

  def round_operand(self, terms):
    """float32 terms as they enter the sum."""
    return round_bf16(terms) if self.operand == "bfloat16" else terms

  def round_accumulator(self, total):
    """float32 running sum as it is kept."""
    return round_bf16(total) if self.accumulator == "bfloat16" else total


P32 = Contract("P32", operand="float32", accumulator="float32")
C = Contract("C", operand="bfloat16", accumulator="float32")
A = Contract("A", operand="float32", accumulator="bfloat16")
B = Contract("B", operand="bfloat16", accumulator="bfloat16")
EXACT = Contract("EXACT", operand="bfloat16", accumulator="exact")

SCHEMES = {contract.name: contract for contract in (P32, C, A, B, EXACT)}
NUM_CODES = 6


def named(name: str) -> Contract:
  """One of P32, C, A, B, EXACT by name."""
  if name not in SCHEMES:
    raise ValueError(f"unknown contract {name!r}: expected one of {', '.join(SCHEMES)}.")
  return SCHEMES[name]


def merge_shared(
  routed: jax.Array,
  shared: jax.Array | None,
  contract: Contract,
  *,
  rounding: Callable[[jax.Array], jax.Array] = round_bf16,
) -> jax.Array:
  """Adds the shared expert's output to a routed sum and rounds as the contract says.

  Args:
    routed: float32 [..., H], accumulator values from `combine`.
    shared: float32 [..., H] of BF16 values, or None for a family without a shared expert.
    contract: shared_merge and output are used.
    rounding: what rounds to BF16; a differentiable stand-in, or none, for other arithmetics.

  Returns:
    float32 [..., H], BF16 values if the contract's output is bfloat16.
  """
  out = rounding if contract.output == "bfloat16" else jnp.asarray
  if shared is None:
    return out(routed)
  if contract.shared_merge == "rounded":
    routed = rounding(routed)
  return out(routed + shared)
