"""What reordering one combine does: distinct results, their spread around the exact sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine.certificate import certify
from moejax.combine.contract import Contract, EXACT
from moejax.combine.enumeration import all_orders_fingerprints, combine_all_orders
from moejax.combine.orders import structural_classes
from moejax.combine.reduce import combine
from moejax.numerics.bf16 import round_bf16, ulp_bf16_distance

# Columns whose sums under all orders are held at once.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Spread:
  """All orders of one combine, measured.

  Distances are from the exact sum of the BF16-rounded terms (EXACT), so under P32 and A they hold
  the effect of not rounding the operands as well as that of the order. Ulps are BF16 ulps of the
  rounded outputs, R(sum) against R(exact).

  Attributes:
    orders: int32 [P, K].
    classes: structural class of each order, int64 [P].
    outputs: number of the distinct sum each order gives, in order of first appearance, int [P].
    linf: max |sum − exact| of each order, float32 [P].
    ulps_max: largest ulp distance of each order, int64 [P].
    ulps_mean: mean ulp distance over elements of each order, float64 [P].
    certified: per element, every order provably gives the same sum, bool [H].
    invariant: per element, every order listed did, bool [H].
  """

  orders: np.ndarray
  classes: np.ndarray
  outputs: np.ndarray
  linf: np.ndarray
  ulps_max: np.ndarray
  ulps_mean: np.ndarray
  certified: np.ndarray
  invariant: np.ndarray

  @property
  def num_classes(self) -> int:
    return len(np.unique(self.classes))

  @property
  def num_outputs(self) -> int:
    return len(np.unique(self.outputs))


def measure_spread(terms: jax.Array, contract: Contract, orders: np.ndarray) -> Spread:
  """Combines float32 terms [K, H] in every one of `orders` [P, K] and measures the results.

  Distinct sums are told apart by 128-bit fingerprints (`all_orders_fingerprints`).
  """
  terms = jnp.asarray(terms)
  exact = combine(terms, np.arange(terms.shape[0], dtype=np.int32), EXACT)
  _, prints, linf = all_orders_fingerprints(terms, contract, orders=orders, reference=exact)
  ulps_max = np.zeros(len(orders), np.int64)
  ulps_sum = np.zeros(len(orders), np.int64)
  invariant = np.zeros(terms.shape[1], bool)
  for start in range(0, terms.shape[1], _CHUNK):
    here = slice(start, start + _CHUNK)
    sums = np.asarray(combine_all_orders(terms[:, here], contract, orders=orders)[1])
    words = sums.view(np.uint32)
    invariant[here] = (words == words[:1]).all(axis=0)
    target = np.broadcast_to(round_bf16(np.asarray(exact[here])), sums.shape)
    ulps = ulp_bf16_distance(round_bf16(sums), target)
    ulps_max = np.maximum(ulps_max, ulps.max(axis=1))
    ulps_sum += ulps.sum(axis=1)
  return Spread(
    orders=orders,
    classes=structural_classes(orders, contract),
    outputs=_number_by_appearance(np.asarray(prints)),
    linf=np.asarray(linf),
    ulps_max=ulps_max,
    ulps_mean=ulps_sum / terms.shape[1],
    certified=np.asarray(certify(np.asarray(terms), contract)),
    invariant=invariant,
  )


def _number_by_appearance(rows: np.ndarray) -> np.ndarray:
  """Equal rows get equal numbers, 0, 1, … as they first appear."""
  _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
  rank = np.empty(len(first), np.int64)
  rank[np.argsort(first)] = np.arange(len(first))
  return rank[inverse.reshape(-1)]
