"""What topology and accumulator do to one combine: every pair of them over the same orders."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.combine.accumulators import EMULATED, fold_orders
from moejax.combine.certificate import certify
from moejax.combine.contract import Contract, EXACT, merge_shared
from moejax.combine.enumeration import combine_all_orders
from moejax.combine.orders import check_orders
from moejax.combine.reduce import check_finite_terms, combine
from moejax.combine.topology import ACROSS, expert_parallel, pairwise, SEQUENTIAL, Topology
from moejax.numerics.bf16 import round_bf16, ulp_bf16_distance

NUM_RANKS = (1, 2, 4, 8)


class Row(NamedTuple):
  """The merged outputs of one topology and accumulator.

  Distances are from EXACT's merged output, over all elements and orders; ulps are BF16 ulps.

  Attributes:
    topology: "sequential", "pairwise" or "expert_parallel/ranks/across".
    accumulator: "float32", "bfloat16", or the name of an emulated one.
    num_orders: P.
    distinct_outputs: merged outputs that differ in some bit, NaN counted as one pattern.
    linf_max: largest absolute difference; NaN if there is a NaN.
    ulps_max: largest distance, int; "" if there is a NaN.
    ulps_mean: mean distance, float; "" if there is a NaN.
    certified_share: elements whose sum provably does not depend on the order (`certify`), which
      speaks about sequential sums in a kernel's accumulator; "" for the others.
    equals_native: the identity order gives the merged bits of the native contract.
  """

  topology: str
  accumulator: str
  num_orders: int
  distinct_outputs: int
  linf_max: float
  ulps_max: int | str
  ulps_mean: float | str
  certified_share: float | str
  equals_native: bool


def survey(
  terms: np.ndarray,
  shared: np.ndarray | None,
  contract: Contract,
  orders: np.ndarray,
  slot_order: np.ndarray,
  *,
  ids: np.ndarray | None = None,
  num_experts: int | None = None,
) -> list[Row]:
  """Measures captured terms under other topologies and accumulators.

  Operand precision and shared merge stay the native contract's. Sequential, pairwise and
  expert-parallel sums in float32 and bfloat16, a ring only where its chunks are equal; then
  sequential sums in the `EMULATED` accumulators.

  Args:
    terms: float32 [K, H], in ascending expert id.
    shared: float32 [H] of BF16 values, or None.
    contract: the native one.
    orders: int [P, K], P ≥ 1.
    slot_order: int [K], the order of the router's slots, native for a contract that says so.
    ids: int [K], the experts of the terms; of R ranks, rank id · R // num_experts owns an expert.
      None: the terms are the experts, so that each rank owns a run of them.
    num_experts: of the layer, with `ids`.

  Returns:
    One row per topology and accumulator.

  Raises:
    TypeError: terms are not float32.
    ValueError: NaN terms; orders that are none or no permutations of them; ids that are not those
      of K among `num_experts`.
  """
  terms = np.asarray(check_finite_terms("survey", terms, allow_nan=False, batched=False))
  num_terms, hidden = terms.shape
  orders = check_orders("survey", orders)
  if not len(orders) or orders.shape[1] != num_terms:
    raise ValueError(f"survey: expected orders [P, {num_terms}], P ≥ 1, got {orders.shape}.")
  identity = np.arange(num_terms, dtype=np.int32)
  ids, num_experts = (identity, num_terms) if ids is None else (np.asarray(ids), num_experts)
  if num_experts is None or ids.shape != (num_terms,) or not set(ids) <= set(range(num_experts)):
    raise ValueError(
      f"survey: expected {num_terms} ids below num_experts={num_experts}, got {ids}."
    )
  native_order = slot_order if contract.order == "slot" else identity
  native = _merge(combine(terms, native_order, contract)[None], shared, contract)
  exact = _merge(combine(terms, identity, EXACT)[None], shared, contract)
  every = np.concatenate([identity[None], orders])

  def row(topology: str, accumulator: str, sums, certified_share: float | str = "") -> Row:
    outputs = _merge(sums, shared, contract)
    equals_native = bool((_bits(outputs[:1]) == _bits(native)).all())
    return Row(topology, accumulator, *_measure(outputs[1:], exact), certified_share, equals_native)

  rows = []
  for name, topology in _topologies(num_terms, hidden).items():
    for accumulator in ("float32", "bfloat16"):
      # Nothing but what the sum depends on: families share its compiled programs.
      scheme = Contract(accumulator, contract.operand, accumulator, topology=topology)
      if topology == SEQUENTIAL:
        sums = combine_all_orders(terms, scheme, orders=every)[1]
        rows.append(row(name, accumulator, sums, float(certify(terms, scheme).mean())))
        continue
      owners = ids * topology.num_ranks // num_experts
      one = lambda order: combine(terms, order, scheme, ranks=owners)
      rows.append(row(name, accumulator, jax.vmap(one)(jnp.asarray(every))))
  operands = contract.round_operand(terms)
  for accumulator in EMULATED:
    rows.append(row("sequential", accumulator.name, fold_orders(operands, every, accumulator)))
  return rows


def _topologies(num_terms: int, hidden: int) -> dict[str, Topology]:
  parallel = {
    f"expert_parallel/{ranks}/{across}": expert_parallel(ranks, across)
    for ranks in NUM_RANKS
    for across in ACROSS
    if across != "ring" or hidden % ranks == 0
  }
  return {"sequential": SEQUENTIAL, "pairwise": pairwise(num_terms), **parallel}


def _merge(sums, shared, contract: Contract) -> np.ndarray:
  """Routed sums [P, H] → merged outputs [P, H], by the operations of the model."""
  if shared is not None:
    shared = jnp.broadcast_to(jnp.asarray(shared)[None], sums.shape)
  return np.asarray(merge_shared(jnp.asarray(sums), shared, contract))


def _measure(outputs: np.ndarray, exact: np.ndarray) -> tuple:
  """Of outputs [P, H] against exact [1, H]: P, distinct, linf_max, ulps_max, ulps_mean."""
  distinct = len({words.tobytes() for words in _bits(outputs)})
  with np.errstate(over="ignore", invalid="ignore"):
    # Infinities that agree are no distance apart.
    apart = np.where(outputs == exact, np.float32(0), np.abs(outputs - exact))
  linf = float(apart.max())
  if np.isnan(outputs).any() or np.isnan(exact).any():
    return len(outputs), distinct, linf, "", ""
  target = np.broadcast_to(round_bf16(exact), outputs.shape)
  ulps = ulp_bf16_distance(round_bf16(outputs), target)
  return len(outputs), distinct, linf, int(ulps.max()), float(ulps.mean())


def _bits(x: np.ndarray) -> np.ndarray:
  """uint32 of float32, NaN as one pattern."""
  return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)
