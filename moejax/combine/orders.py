"""Orders of a sum: enumeration, numbering, and the classes that must agree bit for bit.

Orders are numbered lexicographically over the terms as listed (ascending expert id). A class is
represented by its lowest order, and class ids count representatives.
"""

import functools
import itertools
import math

import jax
import numpy as np

from moejax.combine.contract import Contract
from moejax.combine.topology import balanced, Tree

# 8! = 40,320 orders; of a 4096-wide combine they are 660 MB.
MAX_ENUMERATED_TERMS = 8
MAX_TERMS = 16


@functools.cache
def all_orders(num_terms: int) -> np.ndarray:
  """Every order of `num_terms` terms, lexicographic: int32 [k!, k], read-only."""
  if not 1 <= num_terms <= MAX_ENUMERATED_TERMS:
    raise ValueError(
      f"all_orders: {num_terms} terms have {num_terms}! orders; enumeration is bounded to 1 .. "
      f"{MAX_ENUMERATED_TERMS} terms, beyond that pass orders of your own (sample_orders)."
    )
  orders = np.array(list(itertools.permutations(range(num_terms))), np.int32)
  orders.flags.writeable = False
  return orders


def class_representatives(num_terms: int, contract: Contract) -> np.ndarray:
  """The lowest order of every structural class of a sequential sum: int32 [classes, k]."""
  orders = all_orders(num_terms)
  if contract.accumulator == "exact":
    return orders[:1]
  if not contract.first_pair_commutes or num_terms < 2:
    return orders
  return orders[orders[:, 0] < orders[:, 1]]


def sample_orders(
  num_terms: int, num_orders: int, contract: Contract, *, key: jax.Array
) -> np.ndarray:
  """Distinct orders, one per class, drawn without regard to rank: int32 [num_orders, k].

  For a contract whose first pair commutes each is its class's representative. Sorted by number.
  """
  check_terms("sample_orders", num_terms)
  available = math.factorial(num_terms)
  if contract.first_pair_commutes and num_terms > 1:
    available //= 2
  if num_orders > available:
    raise ValueError(f"sample_orders: {num_orders} orders asked for, {available} exist.")
  chosen: dict[int, np.ndarray] = {}
  for draw in itertools.count():
    bits = jax.random.bits(jax.random.fold_in(key, draw), (num_orders, num_terms))
    orders = np.argsort(np.asarray(bits), axis=1, kind="stable").astype(np.int32)
    if contract.first_pair_commutes:
      orders[:, :2].sort(axis=1)
    for rank, order in zip(lexicographic_rank(orders).tolist(), orders):
      chosen.setdefault(rank, order)
      if len(chosen) == num_orders:
        return np.stack([chosen[rank] for rank in sorted(chosen)])


def study_orders(num_terms: int, contract: Contract, *, key: jax.Array) -> tuple[np.ndarray, bool]:
  """The orders that a study runs, and whether they are a sample.

  All k! orders up to six terms; beyond, 720 sampled ones, or 360 classes where the first pair
  commutes.
  """
  if math.factorial(num_terms) <= 720:
    return all_orders(num_terms), False
  return sample_orders(
    num_terms, 360 if contract.first_pair_commutes else 720, contract, key=key
  ), True


def lexicographic_rank(orders: np.ndarray) -> np.ndarray:
  """Number of each order among all of its length: int64 [P]."""
  num_terms = orders.shape[1]
  # Terms to the right that are smaller: the Lehmer code.
  smaller = orders[:, None, :] < orders[:, :, None]
  code = np.triu(np.ones((num_terms, num_terms), bool), 1)[None] & smaller
  weights = np.array([math.factorial(num_terms - 1 - i) for i in range(num_terms)], np.int64)
  return code.sum(axis=2) @ weights


def structural_classes(orders, contract: Contract, terms=None, *, ranks=None) -> np.ndarray:
  """Class id of each order: orders with the same id give the same bits, whatever the terms.

  The proof is by construction: two orders share a class only if their expressions become the same
  tree by swapping the operands of an IEEE addition and dropping an exact 0 + x (`expression`).

  Args:
    orders: int [P, k].
    contract: with any topology; `ranks` [k] is needed for an expert-parallel one.
    terms: float32 [k, H], if they are known: the proof declines terms with NaN, whose payload an
      addition takes from one side.

  Returns:
    int64 [P]. Of a sequential sum: 0 .. k!-1 or 0 .. k!/2-1, whether or not all orders are given.
  """
  orders = check_orders("structural_classes", orders)
  num_terms = orders.shape[1]
  check_terms("structural_classes", num_terms)
  if terms is not None and np.isnan(np.asarray(terms)).any():
    raise ValueError(
      "structural_classes: declined, a term is NaN and addition of NaNs is not commutative."
    )
  if contract.accumulator == "exact":
    return np.zeros(len(orders), np.int64)
  if contract.topology.kind != "sequential":
    forms = [repr(expression(order, contract, ranks)) for order in orders]
    ids = {form: number for number, form in enumerate(sorted(set(forms)))}
    return np.array([ids[form] for form in forms], np.int64)
  if not contract.first_pair_commutes or num_terms < 2:
    return lexicographic_rank(orders)
  low, high = orders[:, :2].min(axis=1), orders[:, :2].max(axis=1)
  # Pairs (a, b) with a < b before (low, high), then the rest in the order of what remains.
  pairs = low * (2 * num_terms - low - 1) // 2 + (high - low - 1)
  rest = np.argsort(np.argsort(orders[:, 2:], axis=1), axis=1)
  return pairs * math.factorial(num_terms - 2) + (lexicographic_rank(rest) if num_terms > 2 else 0)


def expression(order, contract: Contract, ranks=None):
  """The sum of one order as a nested tuple in normal form: equal forms have equal bits.

  A leaf is a term number. A pair is one rounded addition, its operands sorted, since IEEE addition
  commutes. ("from zero", x) is a first step that rounds; where it is exact it is x itself.
  """
  order = [int(term) for term in order]
  topology = contract.topology
  if topology.kind == "tree":
    return _sorted_tree(topology.tree, order)
  if topology.kind == "sequential":
    return _chain(order, contract)
  if ranks is None:
    raise ValueError("expression: an expert-parallel topology needs the rank of each term.")
  parts = [
    ("rank", rank, _chain([term for term in order if int(ranks[term]) == rank], contract))
    for rank in range(topology.num_ranks)
  ]
  if topology.across == "tree":
    return _sorted_tree(balanced(tuple(range(len(parts)))), parts)
  return ("across", topology.across, *parts)  # ranks always stand in the same places


def _chain(terms: list[int], contract: Contract):
  if not terms:
    return "zero"
  total = terms[0] if contract.first_pair_commutes else ("from zero", terms[0])
  for term in terms[1:]:
    total = _pair(total, term)
  return total


def _sorted_tree(tree: Tree, leaves: list):
  if isinstance(tree, int):
    return leaves[tree]
  return _pair(_sorted_tree(tree[0], leaves), _sorted_tree(tree[1], leaves))


def _pair(left, right):
  return tuple(sorted((left, right), key=repr))


def check_orders(name: str, orders) -> np.ndarray:
  """int32 [P, k] of permutations, or one clear sentence."""
  orders = np.asarray(orders)
  if orders.ndim != 2 or not np.issubdtype(orders.dtype, np.integer):
    raise ValueError(f"{name}: orders must be integers [P, k], got {orders.dtype} {orders.shape}.")
  wrong = (np.sort(orders, axis=1) != np.arange(orders.shape[1])).any(axis=1)
  if wrong.any():
    row = int(np.argmax(wrong))
    raise ValueError(
      f"{name}: order {row}, {orders[row].tolist()}, is not a permutation of 0 .. "
      f"{orders.shape[1] - 1}."
    )
  return orders.astype(np.int32)


def check_terms(name: str, num_terms: int) -> None:
  """Refuses more terms than the kernels and the numbering hold."""
  if not 1 <= num_terms <= MAX_TERMS:
    raise ValueError(f"{name}: declined, {num_terms} terms are not within 1 .. {MAX_TERMS}.")
