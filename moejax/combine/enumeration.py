"""Every order of one combine at once, sharing the sums of common prefixes.

720 orders of six terms under a contract whose first pair commutes cost 975 vector additions instead
of 4,320 (15 + 60 + 180 + 360 + 360); under A, whose first step rounds, 1,956. The custom call walks
the sorted orders with a stack of prefixes in cache; plain XLA adds level by level. A fingerprint
tells orders apart without writing their vectors.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.combine import orders as orders_lib
from moejax.combine.contract import Contract
from moejax.combine.reduce import check_finite_terms, positive_zero
from moejax.numerics import layout
from moejax.numerics.backend import XlaBackend
from moejax.numerics.exact import exact_sum
from moejax.numerics.fingerprint import fingerprint
from moejax.numerics.library import native


def combine_all_orders(
  terms: jax.Array,
  contract: Contract,
  *,
  orders: np.ndarray | None = None,
  allow_nan: bool = False,
) -> tuple[np.ndarray, jax.Array]:
  """`combine` under every order.

  Args:
    terms: float32 [K, H].
    contract: with a sequential topology.
    orders: int32 [P, K], concrete. None: all K! orders, K ≤ 8. `class_representatives` gives one
      per structural class.
    allow_nan: accept NaN terms; see `combine`.

  Returns:
    The orders, int32 [P, K], and their sums, float32 [P, H], accumulator values exactly.
  """
  terms, orders = _check("combine_all_orders", terms, contract, orders, allow_nan)
  code = jnp.int32(contract.code)
  if native():
    return orders, _all_orders_native(terms, jnp.asarray(orders), code)
  return orders, all_orders_xla(terms, StaticOrders(orders), contract)


def all_orders_fingerprints(
  terms: jax.Array,
  contract: Contract,
  *,
  orders: np.ndarray | None = None,
  reference: jax.Array | None = None,
  allow_nan: bool = False,
) -> tuple[np.ndarray, jax.Array, jax.Array]:
  """Which orders differ, and how far from a reference, without the combined vectors.

  A fingerprint is two 64-bit NH sums (Black et al. 1999) over the vector's bits, keyed by position,
  every NaN counted as one pattern. For keys drawn at random, two given vectors that differ collide
  with probability at most 2^-64; the keys are fixed, so that fingerprints can be stored.

  Args:
    terms, contract, orders, allow_nan: as in `combine_all_orders`.
    reference: float32 [H] to measure distances from; None: distances are zero and cost nothing.

  Returns:
    The orders, int32 [P, K]; fingerprints, uint32 [P, 4], comparable between contracts; and
    max |sum − reference|, float32 [P], NaN if any element's is.
  """
  name = "all_orders_fingerprints"
  terms, orders = _check(name, terms, contract, orders, allow_nan)
  if reference is not None and (
    reference.shape != terms.shape[1:] or reference.dtype != np.float32
  ):
    raise ValueError(
      f"{name}: reference must be float32 {terms.shape[1:]}, "
      f"got {reference.dtype} {reference.shape}."
    )
  code = jnp.int32(contract.code)
  if native():
    given = np.zeros(0, np.float32) if reference is None else jnp.asarray(reference)
    return orders, *_fingerprints_native(terms, jnp.asarray(orders), code, given)
  sums = all_orders_xla(terms, StaticOrders(orders), contract)
  return orders, *fingerprint_xla(sums, reference)


@dataclasses.dataclass(frozen=True)
class PrefixPlan:
  """Level-by-level sums of a list of orders.

  Attributes:
    levels: per level (parents, terms): entry i adds term terms[i] to entry parents[i] of the level
      before; the first level only loads.
    rows: int [P], the entry of the last level that is each order's sum.
    num_adds: vector additions that cost something: an exact 0 + x does not.
  """

  levels: tuple[tuple[np.ndarray, np.ndarray], ...]
  rows: np.ndarray
  num_adds: int


def prefix_plan(orders: np.ndarray, first_pair_commutes: bool) -> PrefixPlan:
  """Shares equal prefixes of the orders, the first two terms sorted where they commute."""
  orders = orders.copy()
  if first_pair_commutes:
    orders[:, :2].sort(axis=1)
  levels, entry = [], np.zeros(len(orders), np.int64)
  for level in range(orders.shape[1]):
    step = np.stack([entry, orders[:, level]], axis=1)
    nodes, entry = np.unique(step, axis=0, return_inverse=True)
    entry = entry.reshape(-1)
    levels.append((nodes[:, 0].astype(np.int32), nodes[:, 1].astype(np.int32)))
  num_adds = sum(len(parents) for parents, _ in levels[first_pair_commutes:])
  return PrefixPlan(tuple(levels), entry, num_adds)


class StaticOrders:
  """Concrete orders as a hashable static argument."""

  def __init__(self, orders: np.ndarray):
    self.array = orders
    self._key = (orders.shape, orders.tobytes())

  def __hash__(self):
    return hash(self._key)

  def __eq__(self, other):
    return self._key == other._key


@functools.partial(jax.jit, static_argnums=(1, 2))
def all_orders_xla(terms: jax.Array, orders: StaticOrders, contract: Contract) -> jax.Array:
  """`combine_all_orders` in plain XLA."""
  operands = contract.round_operand(XlaBackend.fence(terms))  # from a gate product
  if contract.accumulator == "exact":
    total = exact_sum(operands, axis=0)
    return jnp.broadcast_to(total[None], (len(orders.array), *total.shape))
  plan = prefix_plan(orders.array, contract.first_pair_commutes)
  sums = None
  for parents, terms_at in plan.levels:
    added = (
      positive_zero(operands[terms_at]) if sums is None else sums[parents] + operands[terms_at]
    )
    sums = contract.round_accumulator(added)
  return sums[plan.rows]


@jax.jit
def fingerprint_xla(sums: jax.Array, reference: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Fingerprints and distances of vectors that have been written: [P, H], [H] → [P, 4], [P]."""
  prints = fingerprint(sums)
  if reference is None:
    return prints, jnp.zeros(sums.shape[0], jnp.float32)
  distance = lax.bitcast_convert_type(sums - reference[None], jnp.uint32) & layout.MAGNITUDE
  # Of bits, so that a NaN is larger than anything.
  largest = distance.max(axis=1, initial=np.uint32(0))
  largest = jnp.where(largest > layout.INFINITY, layout.NAN, largest)
  return prints, lax.bitcast_convert_type(largest, jnp.float32)


@jax.jit
def _all_orders_native(terms, orders, code):
  out = jax.ShapeDtypeStruct((orders.shape[0], terms.shape[1]), jnp.float32)
  call = jax.ffi.ffi_call("moejax_all_orders", out, vmap_method="expand_dims")
  return call(terms, orders, code)


@jax.jit
def _fingerprints_native(terms, orders, code, reference):
  out = (
    jax.ShapeDtypeStruct((orders.shape[0], 4), jnp.uint32),
    jax.ShapeDtypeStruct((orders.shape[0],), jnp.float32),
  )
  call = jax.ffi.ffi_call("moejax_fingerprints", out, vmap_method="expand_dims")
  return call(terms, orders, code, reference)


def _check(name, terms, contract, orders, allow_nan):
  terms = check_finite_terms(name, terms, allow_nan, batched=False)
  if contract.topology.kind != "sequential":
    raise ValueError(
      f"{name}: shares prefixes of a sequential sum, contract {contract.name} has a "
      f"{contract.topology.kind} topology; use vmap of combine."
    )
  if orders is None:
    return terms, orders_lib.all_orders(terms.shape[0])
  orders = orders_lib.check_orders(name, orders)
  if orders.shape[1] != terms.shape[0]:
    raise ValueError(
      f"{name}: orders of {orders.shape[1]} terms do not fit {terms.shape[0]} terms."
    )
  return terms, orders
