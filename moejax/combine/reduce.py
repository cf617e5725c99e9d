"""The expert combine: terms summed in a given order under a given contract.

Two implementations with the same bits, a custom call and plain XLA; the contract's code and the
order are operands of both, so that one compiled program serves every contract and `vmap` over
either is a sweep. XLA flushes subnormal sums, the custom call keeps them: elsewhere the two agree
on every bit. Bits of a NaN result are not part of a contract.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.combine.contract import Contract, NUM_CODES
from moejax.combine.orders import check_orders, check_terms
from moejax.combine.topology import balanced
from moejax.numerics import backend, domain, layout
from moejax.numerics.bf16 import round_bf16
from moejax.numerics.exact import exact_sum
from moejax.numerics.library import native

_EXACT_CODE = 4  # codes from here on have the exact accumulator


def combine(
  terms: jax.Array,
  order: jax.Array,
  contract: Contract,
  *,
  ranks: jax.Array | None = None,
  allow_nan: bool = False,
) -> jax.Array:
  """Sums weighted expert terms in the given order: the routed sum before the shared merge.

  Args:
    terms: float32 [K, H], K ≤ 16, gates inside, in ascending expert id.
    order: int32 [K], a permutation.
    contract: operand and accumulator precision, and the topology.
    ranks: int32 [K], the rank that owns each term, for an expert-parallel topology.
    allow_nan: accept NaN terms. Terms and orders are checked where they are concrete; inside jit
      nothing can be refused and a NaN propagates.

  Returns:
    float32 [H], accumulator values exactly.
  """
  terms = check_finite_terms("combine", terms, allow_nan, batched=False)
  order = _int32("combine", "order", order)
  _check_order("combine", order, terms.shape[0])
  if contract.topology.kind == "sequential" or contract.accumulator == "exact":
    code = jnp.int32(contract.code)
    return combine_rows(terms, order, code, allow_nan=True)
  # Terms often come straight from gate · output in the same program; see backend.
  operands = contract.round_operand(backend.XlaBackend.fence(terms))
  if contract.topology.kind == "tree":
    return _combine_tree(operands[order], contract)
  if ranks is None:
    raise ValueError("combine: an expert-parallel topology needs `ranks`, the rank of each term.")
  return _combine_ranks(operands, order, jnp.asarray(ranks, jnp.int32), contract)


def combine_rows(
  terms: jax.Array, orders: jax.Array, codes: jax.Array, *, allow_nan: bool = False
) -> jax.Array:
  """`combine` for a batch of tokens, each with an order and a contract code of its own.

  Args:
    terms: float32 [*B, K, H].
    orders: int32 [*B, K].
    codes: int32 [*B] of `Contract.code`; sequential topology.
    allow_nan: as in `combine`.

  Returns:
    float32 [*B, H].
  """
  terms = check_finite_terms("combine_rows", terms, allow_nan)
  orders, codes = (
    _int32("combine_rows", label, x) for label, x in (("orders", orders), ("codes", codes))
  )
  lead = terms.shape[:-2]
  if orders.shape != (*lead, terms.shape[-2]) or codes.shape != lead:
    raise ValueError(
      f"combine_rows: terms {terms.shape} want orders {(*lead, terms.shape[-2])} and codes {lead}, "
      f"got {orders.shape} and {codes.shape}."
    )
  if not isinstance(codes, jax.core.Tracer) and ((codes < 0) | (codes >= NUM_CODES)).any():
    raise ValueError(f"combine_rows: a contract code is outside 0 .. {NUM_CODES - 1}.")
  if not isinstance(orders, jax.core.Tracer):
    check_orders("combine_rows", np.asarray(orders).reshape(-1, terms.shape[-2]))
  if domain.checking():
    terms = domain.check_sums("combine_rows", terms, orders, codes)
  return _rows_native(terms, orders, codes) if native() else rows_xla(terms, orders, codes)


@jax.jit
def _rows_native(terms, orders, codes):
  out = jax.ShapeDtypeStruct((*terms.shape[:-2], terms.shape[-1]), jnp.float32)
  call = jax.ffi.ffi_call("moejax_combine", out, vmap_method="expand_dims")
  return call(terms, orders, codes)


@jax.jit
def rows_xla(terms, orders, codes):
  """`combine_rows` in plain XLA."""
  lead, (k, h) = terms.shape[:-2], terms.shape[-2:]
  flat = (terms.reshape(-1, k, h), orders.reshape(-1, k), codes.reshape(-1))
  totals = jax.vmap(fold_xla)(*flat)

  def with_exact(totals):
    operands = jnp.where((flat[2] % 2 == 1)[:, None, None], round_bf16(flat[0]), flat[0])
    return jnp.where((flat[2] >= _EXACT_CODE)[:, None], exact_sum(operands, axis=1), totals)

  totals = lax.cond((flat[2] >= _EXACT_CODE).any(), with_exact, lambda totals: totals, totals)
  return totals.reshape(*lead, h)


def fold_xla(terms: jax.Array, order: jax.Array, code: jax.Array) -> jax.Array:
  """One sequential combine in plain XLA: a loop over the order, for codes of P32, C, A and B."""
  terms = backend.XlaBackend.fence(terms)  # from a gate product in the caller's program
  operands = jnp.where(code % 2 == 1, round_bf16(terms), terms)

  def add(j, total):
    total = total + operands[order[j]]
    return jnp.where(code // 2 == 1, round_bf16(total), total)

  total = lax.fori_loop(0, terms.shape[0], add, jnp.zeros_like(terms[0]))
  # A loop of one step is unrolled and 0 + x folded to x, which would keep the sign of a zero.
  return positive_zero(total)


def positive_zero(x: jax.Array) -> jax.Array:
  """x with −0 replaced by +0, by bits: a comparison would flush subnormals."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  return lax.bitcast_convert_type(jnp.where(bits == layout.SIGN, jnp.uint32(0), bits), jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def _combine_tree(operands, contract):
  """operands [K, H] in their order, added as contract.topology.tree says."""

  def add(tree):
    if isinstance(tree, int):
      return operands[tree]
    return contract.round_accumulator(add(tree[0]) + add(tree[1]))

  return contract.round_accumulator(add(contract.topology.tree))


@functools.partial(jax.jit, static_argnums=3)
def _combine_ranks(operands, order, ranks, contract):
  """Partial sums of each rank's operands, then across ranks."""
  topology, num_ranks = contract.topology, contract.topology.num_ranks
  hidden = operands.shape[1]

  def add(j, partials):
    added = contract.round_accumulator(partials + operands[order[j]][None])
    mine = jnp.arange(num_ranks, dtype=jnp.int32) == ranks[order[j]]
    return jnp.where(mine[:, None], added, partials)

  partials = lax.fori_loop(0, operands.shape[0], add, jnp.zeros((num_ranks, hidden), jnp.float32))
  if topology.partial == "bfloat16":
    partials = round_bf16(partials)
  if topology.across == "ring":
    # Element h lies in chunk h · num_ranks // hidden, whose sum starts at the next rank.
    first = jnp.arange(hidden, dtype=jnp.int32) * num_ranks // hidden + 1
    at = (first[None] + jnp.arange(num_ranks, dtype=jnp.int32)[:, None]) % num_ranks
    partials = jnp.take_along_axis(partials, at, axis=0)
  if topology.across == "tree":
    tree = balanced(tuple(range(num_ranks)))
    return positive_zero(_add_tree(tree, partials, contract))
  total = partials[0]
  for rank in range(1, num_ranks):
    total = contract.round_accumulator(total + partials[rank])
  return positive_zero(total)


def _add_tree(tree, leaves, contract):
  if isinstance(tree, int):
    return leaves[tree]
  left, right = (_add_tree(branch, leaves, contract) for branch in tree)
  return contract.round_accumulator(left + right)


def check_finite_terms(name: str, terms, allow_nan: bool, *, batched: bool = True) -> jax.Array:
  """float32 [K, H] (or [*B, K, H]) without NaN as far as that can be seen; else one sentence."""
  dtype, shape = getattr(terms, "dtype", type(terms).__name__), getattr(terms, "shape", ())
  fits = len(shape) >= 2 if batched else len(shape) == 2
  if dtype != np.float32 or not fits:
    error = ValueError if dtype == np.float32 else TypeError
    wanted = "[*B, K, H]" if batched else "[K, H]"
    raise error(f"{name}: terms must be float32 {wanted}, got {dtype} {tuple(shape)}.")
  check_terms(name, shape[-2])
  if not allow_nan and not isinstance(terms, jax.core.Tracer):
    nan = np.isnan(np.asarray(terms))
    if nan.any():
      at = np.argwhere(nan)[0].tolist()
      raise ValueError(f"{name}: terms{at} is NaN; pass allow_nan=True to let it through.")
  return jnp.asarray(terms)


def _int32(name: str, label: str, x) -> jax.Array:
  """x as int32 [...]; anything that is not integers is refused."""
  dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
  if not np.issubdtype(dtype, np.integer):
    raise TypeError(f"{name}: {label} must be integers, got {dtype}.")
  return jnp.asarray(x, jnp.int32)


def _check_order(name: str, order, num_terms: int) -> None:
  if order.shape != (num_terms,):
    raise ValueError(f"{name}: order must have shape ({num_terms},), got {order.shape}.")
  if not isinstance(order, jax.core.Tracer):
    check_orders(name, np.asarray(order)[None])
