"""Sequential sums in accumulators that no kernel has: FP16, FP8, BF16 with guard bits.

NumPy, on the host. A step is that of A and B, a = R(fl32(a + v)) from +0: the addition is float32,
and R rounds its result to the accumulator's format. Where both are inexact the sum is rounded
twice, as a unit that adds in float32 and stores less would.
"""

import dataclasses

import ml_dtypes
import numpy as np

from moejax.combine.enumeration import prefix_plan
from moejax.combine.orders import check_orders
from moejax.combine.reduce import check_finite_terms
from moejax.numerics import backend, layout

_BF16_SIGNIFICAND = 8
_FLOAT32_SIGNIFICAND = 24
_QUIET = np.uint32(0x00400000)


@dataclasses.dataclass(frozen=True)
class Accumulator:
  """The format that a running float32 sum is kept in.

  Rounding is to nearest, ties to even; subnormals and the sign of a zero are kept, NaN stays NaN.
  Overflow is to infinity, in FP16 from 65520 and in E5M2 from 61440. E4M3 has no infinity: beyond
  464, a tie that still goes to its largest value 448, a sum becomes NaN, as does an infinite one.

  Attributes:
    name: for tables.
    dtype: a sum is cast to it and back; None: BF16 with guard bits.
    guard_bits: g, 0 .. 16: 8 + g significand bits and the exponents of float32. BF16 for 0, float32
      itself for 16.
  """

  name: str
  dtype: type | None = None
  guard_bits: int = 0

  def __post_init__(self):
    if not 0 <= self.guard_bits <= _FLOAT32_SIGNIFICAND - _BF16_SIGNIFICAND:
      raise ValueError(
        f"accumulator {self.name!r}: guard_bits must be 0 .. 16, got {self.guard_bits}."
      )
    if self.dtype is not None and self.guard_bits:
      dtype = np.dtype(self.dtype).name
      raise ValueError(f"accumulator {self.name!r}: guard_bits are BF16's, not {dtype}'s.")

  def round(self, x: np.ndarray) -> np.ndarray:
    """float32 of any shape → float32 of that shape, values of this format."""
    backend.require_float32("Accumulator.round", x)
    if self.dtype is None:
      return _drop_bits(x, _FLOAT32_SIGNIFICAND - _BF16_SIGNIFICAND - self.guard_bits)
    with np.errstate(over="ignore"):
      return x.astype(self.dtype).astype(np.float32)


def guarded_bf16(guard_bits: int) -> Accumulator:
  """BF16 with guard bits, "bfloat16+g"."""
  return Accumulator(f"bfloat16+{guard_bits}", guard_bits=guard_bits)


FP16 = Accumulator("float16", np.float16)
FP8_E4M3 = Accumulator("float8_e4m3fn", ml_dtypes.float8_e4m3fn)
FP8_E5M2 = Accumulator("float8_e5m2", ml_dtypes.float8_e5m2)
EMULATED = (FP16, FP8_E4M3, FP8_E5M2, *(guarded_bf16(bits) for bits in range(9)))


def fold(terms: np.ndarray, order: np.ndarray, accumulator: Accumulator) -> np.ndarray:
  """Sums float32 terms [K, H] in one order, int [K]: float32 [H]; as `fold_orders`."""
  return fold_orders(terms, np.asarray(order)[None], accumulator)[0]


def fold_orders(terms: np.ndarray, orders: np.ndarray, accumulator: Accumulator) -> np.ndarray:
  """Sums terms in every given order, sharing the sums of common prefixes.

  Args:
    terms: float32 [K, H], K ≤ 16, no NaN, as they are added: `Contract.round_operand` comes before.
    orders: int [P, K].
    accumulator: rounds after every addition, the first one, +0 + v, too.

  Returns:
    float32 [P, H], accumulator values exactly.

  Raises:
    TypeError: terms are not float32.
    ValueError: NaN terms, too many of them, or orders that are no permutations of them.
  """
  terms = np.asarray(check_finite_terms("fold_orders", terms, allow_nan=False, batched=False))
  orders = check_orders("fold_orders", orders)
  if orders.shape[1] != terms.shape[0]:
    raise ValueError(
      f"fold_orders: orders of {orders.shape[1]} terms do not fit {terms.shape[0]} terms."
    )
  plan = prefix_plan(orders, first_pair_commutes=False)
  sums = np.zeros((1, terms.shape[1]), np.float32)
  with np.errstate(over="ignore", invalid="ignore"):  # infinities, and those of both signs
    for parents, added in plan.levels:
      sums = accumulator.round(sums[parents] + terms[added])
  return sums[plan.rows]


def _drop_bits(x, count: int):
  """`round_bf16`, for any number of low bits."""
  if count == 0:
    return x
  u = x.view(np.uint32)
  kept = np.uint32(0xFFFFFFFF - ((1 << count) - 1))
  u = np.where((u & layout.MAGNITUDE) > layout.INFINITY, (u | _QUIET) & kept, u)
  ties_to_even = (u >> count) & 1
  return ((u + np.uint32((1 << (count - 1)) - 1) + ties_to_even) & kept).view(np.float32)
