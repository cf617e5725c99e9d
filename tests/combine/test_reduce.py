"""One combine: every contract, number of terms and way of calling against a plain NumPy loop."""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine
from moejax.combine import enumeration, reduce
from tests import oracles
from tests.oracles import assert_same_bits

SCHEMES = [combine.P32, combine.C, combine.A, combine.B]
HIDDEN = [1, 7, 64, 1000, 4096]


def expected(terms, order, contract):
  if contract.accumulator == "exact":
    operands = oracles.to_bf16(terms) if contract.operand == "bfloat16" else terms
    return oracles.exact_sum(operands)
  return oracles.combine(terms, order, contract.operand, contract.accumulator)


@pytest.mark.parametrize("contract", SCHEMES, ids=lambda c: c.name)
@pytest.mark.parametrize("num_terms", range(1, 9))
def test_equals_the_scalar_loop_however_it_is_called(each_isa, contract, num_terms):
  rng = np.random.default_rng(num_terms)
  one = lambda terms, order: combine.combine(terms, order, contract)
  plain = jax.vmap(reduce.fold_xla, in_axes=(None, 0, None))

  @jax.jit
  def every_way(terms, orders, code):
    scanned = lax.scan(lambda carry, order: (carry, one(terms, order)), 0, orders)[1]
    mapped = jax.vmap(one, in_axes=(None, 0))(terms, orders)
    jitted = one(terms, orders[0])[None]
    return scanned, mapped, plain(terms, orders, code), jitted, plain(terms, orders[:1], code)

  for hidden in HIDDEN:
    terms = oracles.awkward_terms(rng, num_terms, hidden)
    orders = np.stack([rng.permutation(num_terms) for _ in range(3)]).astype(np.int32)
    want = np.stack([expected(terms, order, contract) for order in orders])
    for _ in each_isa():
      for order, sums in zip(orders, want):
        assert_same_bits(one(jnp.asarray(terms), order), sums)  # eager
    for sums in every_way(jnp.asarray(terms), jnp.asarray(orders), jnp.int32(contract.code)):
      assert_same_bits(sums, want[: len(sums)])


@pytest.mark.parametrize("num_terms", range(1, 9))
def test_exact_equals_fractions(each_isa, num_terms):
  rng = np.random.default_rng(num_terms)
  terms = rng.standard_normal((num_terms, 64)).astype(np.float32)
  terms *= np.exp2(rng.uniform(-40, 40, terms.shape)).astype(np.float32)
  terms[:, :8] = np.float32(-0.0)
  terms[-1, 8:16] = -terms[0, 8:16]
  order = rng.permutation(num_terms).astype(np.int32)
  exact32 = combine.Contract("exact of float32", operand="float32", accumulator="exact")
  for contract in (combine.EXACT, exact32):
    want = expected(terms, order, contract)
    for _ in each_isa():
      assert_same_bits(combine.combine(jnp.asarray(terms), order, contract), want)
    codes = jnp.int32(contract.code)
    assert_same_bits(reduce.rows_xla(jnp.asarray(terms), jnp.asarray(order), codes), want)
  nine = np.concatenate([terms] * 2)[: min(16, 2 * num_terms)]
  assert_same_bits(
    combine.combine(jnp.asarray(nine), np.arange(len(nine)), combine.EXACT),
    expected(nine, None, combine.EXACT),
  )


def test_exact_on_10000_columns_with_40_binade_spreads():
  rng = np.random.default_rng(0)
  terms = rng.standard_normal((6, 10_000)) * np.exp2(rng.uniform(-40, 0, (6, 10_000)))
  terms = oracles.to_bf16(terms)
  terms[5, ::3] = -oracles.to_bf16(terms[:5, ::3].sum(axis=0))  # cancellation
  sums = combine.combine(jnp.asarray(terms), np.arange(6), combine.EXACT)
  assert_same_bits(sums, oracles.exact_sum(terms))


def test_exact_rounds_once_where_rounding_twice_would_miss(each_isa):
  # A tie of the first two terms that a third, far below FP64's last bit, decides.
  odd = 1 + 2.0**-23
  columns = np.array(
    [
      [1, 2.0**-24, 2.0**-60],
      [1, 2.0**-24, -(2.0**-60)],
      [odd, 2.0**-24, 2.0**-60],
      [odd, 2.0**-24, -(2.0**-60)],
      [-odd, -(2.0**-24), 2.0**-60],
      [-1, -(2.0**-24), -(2.0**-60)],
    ],
    np.float32,
  ).T.copy()
  want = np.array([odd, 1, 1 + 2.0**-22, odd, -odd, -odd], np.float32)
  assert_same_bits(oracles.exact_sum(columns), want)
  exact32 = combine.Contract("exact of float32", operand="float32", accumulator="exact")
  for _ in each_isa():
    assert_same_bits(combine.combine(jnp.asarray(columns), np.arange(3), exact32), want)
  for order in combine.all_orders(3):
    code = jnp.int32(exact32.code)
    assert_same_bits(reduce.rows_xla(jnp.asarray(columns), jnp.asarray(order), code), want)


def test_exact_handles_infinity_overflow_and_the_smallest_numbers():
  columns = np.array(
    [
      [np.inf, 1, 2],
      [np.inf, -np.inf, 1],
      [-np.inf, -np.inf, 0],
      [3e38, 3e38, -3e38],
      [3e38, 3e38, 0],
      [2.0**-149, 2.0**-149, -(2.0**-148)],
      [2.0**-149, 2.0**-149, 0],
      [2.0**127, 2.0**-149, -(2.0**127)],
    ],
    np.float32,
  ).T.copy()
  want = np.array([np.inf, np.nan, -np.inf, 3e38, np.inf, 0, 2.0**-148, 2.0**-149], np.float32)
  exact32 = combine.Contract("exact of float32", operand="float32", accumulator="exact")
  assert_same_bits(combine.combine(jnp.asarray(columns), np.arange(3), exact32), want)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_custom_call_keeps_subnormal_sums_where_plain_xla_flushes(each_isa, hidden):
  rng = np.random.default_rng(hidden)
  terms = oracles.subnormal_terms(rng, 6, hidden)
  orders = np.stack([rng.permutation(6) for _ in range(2)]).astype(np.int32)
  for contract in SCHEMES:
    want = np.stack([expected(terms, order, contract) for order in orders])
    assert hidden == 1 or np.count_nonzero(want) > hidden
    one = lambda order, contract=contract: combine.combine(jnp.asarray(terms), order, contract)
    for _ in each_isa():
      assert_same_bits(one(orders[0]), want[0])
    assert_same_bits(jax.jit(jax.vmap(one))(jnp.asarray(orders)), want)
    assert_same_bits(lax.scan(lambda c, o: (c, one(o)), 0, jnp.asarray(orders))[1], want)
    code = jnp.int32(contract.code)
    flushed = reduce.fold_xla(jnp.asarray(terms), jnp.asarray(orders[0]), code)
    assert not np.asarray(flushed).any()


@pytest.mark.parametrize("contract", SCHEMES, ids=lambda c: c.name)
def test_the_gate_product_is_not_contracted_with_the_sum(contract):
  rng = np.random.default_rng(7)
  outputs = rng.standard_normal((6, 3000)).astype(np.float32)
  gates = rng.random((6, 1)).astype(np.float32)
  terms = gates * outputs
  order = np.arange(6, dtype=np.int32)
  static = enumeration.StaticOrders(order[None])
  code = jnp.int32(contract.code)
  tree = dataclasses.replace(contract, topology=combine.pairwise(6))
  ranks = dataclasses.replace(contract, topology=combine.expert_parallel(2))

  @jax.jit
  def from_product(gates, outputs):
    t = gates * outputs
    return (
      combine.combine(t, order, contract),
      reduce.fold_xla(t, jnp.asarray(order), code),
      enumeration.all_orders_xla(t, static, contract)[0],
      combine.combine(t, order, tree),
      combine.combine(t, order, ranks, ranks=jnp.array([0, 1, 0, 1, 0, 1], jnp.int32)),
    )

  first, *rest = from_product(jnp.asarray(gates), jnp.asarray(outputs))
  want = expected(terms, order, contract)
  for sums in (first, *rest[:2]):
    assert_same_bits(sums, want)
  assert_same_bits(rest[2], combine.combine(jnp.asarray(terms), order, tree))
  given = jnp.array([0, 1, 0, 1, 0, 1], jnp.int32)
  assert_same_bits(rest[3], combine.combine(jnp.asarray(terms), order, ranks, ranks=given))


def test_rows_of_several_contracts_share_one_program():
  rng = np.random.default_rng(4)
  contracts = [*SCHEMES, combine.EXACT] * 4
  terms = np.stack([oracles.awkward_terms(rng, 6, 130) for _ in contracts])
  terms[np.isinf(terms)] = 1
  orders = np.stack([rng.permutation(6) for _ in contracts]).astype(np.int32)
  codes = jnp.array([contract.code for contract in contracts], jnp.int32)
  want = np.stack([expected(*row) for row in zip(terms, orders, contracts)])
  operands = (jnp.asarray(terms), jnp.asarray(orders), codes)
  assert_same_bits(combine.combine_rows(*operands), want)
  assert_same_bits(reduce.rows_xla(*operands), want)
  assert_same_bits(jax.vmap(combine.combine_rows)(*operands), want)
  grid = [x.reshape(4, 5, *x.shape[1:]) for x in operands]
  assert_same_bits(combine.combine_rows(*grid).reshape(want.shape), want)
  one_set = jax.vmap(combine.combine_rows, in_axes=(None, 0, 0))(operands[0][0], *operands[1:])
  assert_same_bits(one_set, np.stack([expected(terms[0], o, c) for o, c in zip(orders, contracts)]))


def test_bf16_rounding_of_ties_and_nan_inside_the_kernel(each_isa):
  # One term under A is a bare rounding: every high half with tie-breaking low halves, and NaNs.
  high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
  low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
  words = (high[:, None] | low).reshape(1, -1)
  values = words.view(np.float32)
  for _ in each_isa():
    out = np.asarray(combine.combine(jnp.asarray(values), [0], combine.A, allow_nan=True))
    nan = np.isnan(values[0])
    assert np.isnan(out[nan]).all()
    ordinary = ~nan & (values[0] != 0)
    assert_same_bits(out[ordinary], oracles.to_bf16(values[0][ordinary]))


def test_an_inf_meeting_its_opposite_is_nan_and_stays_it():
  terms = np.array([[np.inf], [-np.inf], [1.0]], np.float32)
  for contract in (*SCHEMES, combine.EXACT):
    out = combine.combine(jnp.asarray(terms), [0, 1, 2], contract)
    assert np.isnan(np.asarray(out)).all()


@pytest.mark.parametrize("contract", SCHEMES, ids=lambda c: c.name)
def test_fixed_trees_against_a_recursive_loop(contract):
  rng = np.random.default_rng(5)
  terms = rng.standard_normal((6, 33)).astype(np.float32)

  def loop(tree, leaves):
    if isinstance(tree, int):
      value = terms[leaves[tree]]
      return oracles.to_bf16(value) if contract.operand == "bfloat16" else value
    total = loop(tree[0], leaves) + loop(tree[1], leaves)
    return oracles.to_bf16(total) if contract.accumulator == "bfloat16" else total

  for topology in (combine.pairwise(6), combine.fixed_tree(((3, (1, 0)), (2, (5, 4))))):
    tree_contract = dataclasses.replace(contract, topology=topology)
    for _ in range(3):
      order = rng.permutation(6).astype(np.int32)
      got = combine.combine(jnp.asarray(terms), order, tree_contract)
      assert_same_bits(got, loop(topology.tree, order))
      lanes = jax.vmap(lambda o: combine.combine(jnp.asarray(terms), o, tree_contract))
      assert_same_bits(lanes(jnp.asarray(order)[None])[0], got)


@pytest.mark.parametrize("across", ["sequential", "tree", "ring"])
@pytest.mark.parametrize("partial", ["float32", "bfloat16"])
@pytest.mark.parametrize("contract", SCHEMES, ids=lambda c: c.name)
def test_expert_parallel_sums_against_a_loop_over_ranks(contract, across, partial):
  rng = np.random.default_rng(6)
  terms = rng.standard_normal((8, 21)).astype(np.float32)
  for num_ranks in (1, 2, 4, 5):
    ranks = rng.integers(0, num_ranks, 8).astype(np.int32)
    order = rng.permutation(8).astype(np.int32)
    topology = combine.expert_parallel(num_ranks, across, partial)
    got = combine.combine(
      jnp.asarray(terms), order, dataclasses.replace(contract, topology=topology), ranks=ranks
    )
    parts = []
    for rank in range(num_ranks):
      mine = [term for term in order if ranks[term] == rank]
      part = oracles.combine(terms, mine, contract.operand, contract.accumulator)
      parts.append(oracles.to_bf16(part) if partial == "bfloat16" else part)
    assert_same_bits(got, across_ranks(parts, across, contract))


def across_ranks(parts, across, contract):
  """Columns one by one, so that a ring's chunks need no gather."""
  rounded = oracles.to_bf16 if contract.accumulator == "bfloat16" else (lambda x: np.float32(x))
  n, width = len(parts), len(parts[0])
  out = np.zeros(width, np.float32)
  for h in range(width):
    column = [part[h] for part in parts]
    if across == "tree":
      while len(column) > 1:
        column = pair_up(column, rounded)
      out[h] = column[0]
      continue
    start = (h * n // width + 1) % n if across == "ring" else 0
    total = column[start]
    for step in range(1, n):
      total = rounded(total + column[(start + step) % n])
    out[h] = total
  return out


def pair_up(column, rounded):
  """The top-down balanced tree of up to five leaves, bottom level first."""
  if len(column) == 5:
    return [rounded(rounded(column[0] + column[1]) + column[2]), rounded(column[3] + column[4])]
  if len(column) == 3:
    return [rounded(column[0] + column[1]), column[2]]
  return [rounded(column[i] + column[i + 1]) for i in range(0, len(column), 2)]


@pytest.mark.parametrize(
  "change,error,message",
  [
    (
      dict(terms=np.ones(4, np.float32)),
      ValueError,
      r"terms must be float32 \[K, H\], got float32 \(4,\)",
    ),
    (dict(terms=np.ones((3, 4))), TypeError, "terms must be float32 .*, got float64"),
    (dict(order=[0, 1, 1]), ValueError, r"order 0, \[0, 1, 1\], is not a permutation of 0 .. 2"),
    (dict(order=[0, 1]), ValueError, r"order must have shape \(3,\), got \(2,\)"),
    (dict(order=[0.0, 1.0, 2.0]), TypeError, "combine: order must be integers, got float64"),
    (
      dict(terms=np.ones((17, 4), np.float32), order=range(17)),
      ValueError,
      "17 terms are not within 1 .. 16",
    ),
    (
      dict(terms=np.array([[1, 2], [3, np.nan], [4, 5]], np.float32)),
      ValueError,
      r"combine: terms\[1, 1\] is NaN; pass allow_nan=True",
    ),
    (
      dict(
        contract=combine.Contract("ep", "float32", "float32", topology=combine.expert_parallel(2))
      ),
      ValueError,
      "needs `ranks`",
    ),
  ],
)
def test_bad_input_gets_one_sentence(change, error, message):
  call = dict(terms=np.ones((3, 4), np.float32), order=[0, 1, 2], contract=combine.B) | change
  with pytest.raises(error, match=message):
    combine.combine(call["terms"], np.array(call["order"]), call["contract"])


def test_bad_codes_and_shapes_of_rows():
  terms, orders = (
    jnp.ones((2, 3, 4), jnp.float32),
    jnp.zeros((2, 3), jnp.int32) + jnp.arange(3, dtype=jnp.int32)[None],
  )
  with pytest.raises(ValueError, match=r"contract code is outside 0 \.\. 5"):
    combine.combine_rows(terms, orders, jnp.array([0, 6], jnp.int32))
  with pytest.raises(ValueError, match=r"combine_rows: terms .* want orders"):
    combine.combine_rows(terms, orders[0], jnp.array([0, 1], jnp.int32))
  with pytest.raises(TypeError, match="combine_rows: codes must be integers, got float32"):
    combine.combine_rows(terms, orders, jnp.zeros(2, jnp.float32))
  with pytest.raises(TypeError, match="combine_rows: orders must be integers, got float32"):
    jax.jit(combine.combine_rows)(terms, orders.astype(jnp.float32), jnp.zeros(2, jnp.int32))
  # Inside jit only the kernel can see them.
  for given, codes, sentence in (
    (orders.at[0, 0].set(3), jnp.zeros(2, jnp.int32), "an order names term 3 of 3"),
    (orders, jnp.full(2, 9, jnp.int32), "unknown contract code 9"),
  ):
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
      jax.block_until_ready(jax.jit(combine.combine_rows)(terms, given, codes))
