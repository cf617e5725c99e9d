"""Emulated accumulators against rationals and scalar loops; the survey on cases done by hand."""

import dataclasses
import fractions

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax import combine
from moejax.combine import topology_survey
from moejax.numerics.bf16 import round_bf16
from tests import oracles
from tests.oracles import assert_same_bits

FLOAT32 = combine.guarded_bf16(16)
# Significand bits, exponent of the smallest subnormal, exponent beyond the largest number.
FORMATS = {"float16": (11, -24, 16), "float8_e5m2": (3, -16, 16), "float8_e4m3fn": (4, -9, 9)}
FORMATS |= {f"bfloat16+{g}": (8 + g, -133 - g, 128) for g in (*range(9), 16)}
SCALARS = {
  combine.FP16: np.float16,
  combine.FP8_E4M3: ml_dtypes.float8_e4m3fn,
  combine.FP8_E5M2: ml_dtypes.float8_e5m2,
  combine.guarded_bf16(0): ml_dtypes.bfloat16,
  FLOAT32: np.float32,
}
ULP, TIE = 2.0**-7, 2.0**-8  # of BF16 above one, and half of it


def test_every_format_is_emulated_once():
  assert [a.name for a in combine.EMULATED] == [
    *("float16", "float8_e4m3fn", "float8_e5m2"),
    *(f"bfloat16+{g}" for g in range(9)),
  ]


def add_rationals(total, term, name):
  """R(fl32(total + term)) by exact rationals, each rounded by hand to its format's bits."""
  if not np.isfinite(total):
    return total
  exact = fractions.Fraction(total) + fractions.Fraction(term)
  if exact == 0:
    return -0.0 if np.signbit(total) and np.signbit(term) else 0.0
  single = oracles.round_fraction(exact)
  rounded = single
  if np.isfinite(single):
    rounded = oracles.round_fraction(fractions.Fraction(single), *FORMATS[name])
  return float("nan") if name == "float8_e4m3fn" and abs(rounded) > 448 else rounded


@pytest.mark.parametrize("accumulator", [*combine.EMULATED, FLOAT32], ids=lambda a: a.name)
def test_folds_equal_rational_arithmetic(accumulator):
  significand, smallest, top = FORMATS[accumulator.name]
  rng = np.random.default_rng(0)
  # Three blocks of columns: the format's smallest numbers, ordinary ones, its largest.
  exponents = [rng.integers(low, low + 3, (5, 24)) for low in (max(smallest, -146), -1, top - 3)]
  fine = rng.uniform(1, 2, (5, 72)) * rng.choice([-1, 1], (5, 72))
  coarse = np.rint(np.ldexp(fine, significand)) * 2.0**-significand  # ties
  fine[:, ::2] = coarse[:, ::2]
  terms = np.ldexp(fine, np.concatenate(exponents, axis=1)).astype(np.float32)
  orders = np.stack([rng.permutation(5) for _ in range(3)])
  want = np.zeros((3, 72), np.float32)
  for row, order in enumerate(orders):
    for column in range(72):
      total = 0.0
      for term in terms[order, column].tolist():
        total = add_rationals(total, term, accumulator.name)
      want[row, column] = total
  assert_same_bits(combine.fold_orders(terms, orders, accumulator), want)
  assert (np.abs(want[:, :24]) < 2.0 ** (smallest + significand - 1)).any()  # subnormal
  assert np.isfinite(want[:, :48]).all() and not np.isfinite(want[:, 48:]).all()
  assert len(np.unique(want, axis=0)) == 3


@pytest.mark.parametrize("accumulator", SCALARS, ids=lambda a: a.name)
def test_folds_equal_a_loop_over_scalars(accumulator):
  kept = SCALARS[accumulator]
  terms = oracles.awkward_terms(np.random.default_rng(1), 4, 60)
  orders = combine.all_orders(4)[::-1]
  want = np.zeros((24, 60), np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    for row, order in enumerate(orders):
      for column in range(60):
        total = kept(0)
        for term in order:
          total = kept(np.float32(total) + terms[term, column])
        want[row, column] = np.float32(total)
  assert_same_bits(combine.fold_orders(terms, orders, accumulator), want)
  assert_same_bits(combine.fold(terms, orders[5], accumulator), want[5])
  assert len(np.unique(want[:, ~np.isnan(want).any(axis=0)], axis=0)) > 6


@pytest.mark.parametrize(
  "accumulator,bits", [(combine.FP16, 11), *((combine.guarded_bf16(g), 8 + g) for g in range(9))]
)
def test_the_float32_addition_rounds_before_the_accumulator_does(accumulator, bits):
  # Above the tie by less than float32 sees: rounded once, it would go up.
  terms = np.array([[1], [2.0**-bits + 2.0 ** (-bits - 23)]], np.float32)
  assert rounded_once(terms, bits) == 1 + 2.0 ** (1 - bits)
  assert combine.fold(terms, [0, 1], accumulator)[0] == 1


def rounded_once(terms, bits):
  return oracles.round_fraction(sum(fractions.Fraction(float(x)) for x in terms[:, 0]), bits)


@pytest.mark.parametrize(
  "accumulator,largest,beyond,gives",
  [
    (combine.FP16, 65519, 65520, np.inf),
    (combine.FP8_E5M2, 61439, 61440, np.inf),
    (combine.FP8_E4M3, 464, np.nextafter(np.float32(464), np.float32(465)), np.nan),
  ],
)
def test_overflow_is_what_the_docstring_says(accumulator, largest, beyond, gives):
  top = {"float16": 65504, "float8_e5m2": 57344, "float8_e4m3fn": 448}[accumulator.name]
  x = np.array([largest, -largest, beyond, -beyond, np.inf, np.nan], np.float32)
  assert_same_bits(
    accumulator.round(x), np.array([top, -top, gives, -gives, gives, np.nan], np.float32)
  )


@pytest.mark.parametrize("contract", [combine.P32, combine.C, combine.A, combine.B])
def test_no_guard_bits_are_bf16_and_sixteen_are_float32_in_the_kernels(contract):
  terms = oracles.awkward_terms(np.random.default_rng(2), 5, 150)
  accumulator = combine.guarded_bf16(0 if contract.accumulator == "bfloat16" else 16)
  orders, sums = combine.combine_all_orders(jnp.asarray(terms), contract)
  operands = contract.round_operand(terms)
  assert_same_bits(combine.fold_orders(operands, orders, accumulator), sums)
  one = combine.combine(jnp.asarray(terms), orders[77], contract)
  assert_same_bits(combine.fold(operands, orders[77], accumulator), one)


def test_rounding_keeps_nan_whatever_its_payload():
  high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
  words = high[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
  x = words.view(np.float32)
  bf16 = combine.guarded_bf16(0).round(x)
  np.testing.assert_array_equal(bf16.view(np.uint32), round_bf16(x).view(np.uint32))
  for accumulator in (*combine.EMULATED, FLOAT32):
    assert np.isnan(accumulator.round(x)[np.isnan(x)]).all()
  assert combine.guarded_bf16(3).round(x).shape == x.shape
  np.testing.assert_array_equal(FLOAT32.round(x).view(np.uint32), words)


def test_signs_of_zeros():
  zeros = np.full((2, 1), -0.0, np.float32)
  for accumulator in combine.EMULATED:
    assert_same_bits(combine.fold(zeros, [0, 1], accumulator), np.zeros(1, np.float32))
  small = np.full((2, 1), -(2.0**-30), np.float32)  # below every FP8: each step rounds to −0
  for accumulator in (combine.FP8_E4M3, combine.FP8_E5M2):
    assert_same_bits(combine.fold(small, [0, 1], accumulator), np.full(1, -0.0, np.float32))


def test_more_guard_bits_round_less():
  x = np.random.default_rng(3).standard_normal(500).astype(np.float32)
  errors = [np.abs(combine.guarded_bf16(g).round(x) - x).max() for g in range(17)]
  assert errors[16] == 0 and (np.diff(errors) < 0).all()


def test_bad_accumulators_and_folds_get_one_sentence():
  terms = np.ones((3, 4), np.float32)
  for bad in (-1, 17):
    with pytest.raises(ValueError, match=rf"guard_bits must be 0 \.\. 16, got {bad}"):
      combine.guarded_bf16(bad)
  with pytest.raises(ValueError, match="accumulator 'x': guard_bits are BF16's, not float16's"):
    combine.Accumulator("x", np.float16, 2)
  with pytest.raises(TypeError, match=r"Accumulator.round: expected a float32 array, got float64"):
    combine.FP16.round(np.ones(3))
  with pytest.raises(TypeError, match=r"fold_orders: terms must be float32 .*, got float64"):
    combine.fold(np.ones((3, 4)), [0, 1, 2], combine.FP16)
  with pytest.raises(ValueError, match="fold_orders: orders of 2 terms do not fit 3 terms"):
    combine.fold(terms, [0, 1], combine.FP16)
  with pytest.raises(ValueError, match=r"fold_orders: order 0, \[0, 1, 1\], is not a permutation"):
    combine.fold(terms, [0, 1, 1], combine.FP16)
  with pytest.raises(ValueError, match=r"fold_orders: terms\[0, 0\] is NaN"):
    combine.fold(np.full((1, 1), np.nan, np.float32), [0], combine.FP16)


# The survey. Column 0 is 1, TIE, TIE, TIE: BF16 loses each TIE that it adds to one, unless two have
# met before, so that shapes differ; the other columns are zeros. Always 4 × 8 and two orders, since
# each new shape compiles every topology anew.

ACROSS = ("sequential", "tree", "ring")
ORDERS = np.array([[0, 1, 2, 3], [1, 2, 3, 0]], np.int32)


def columns_of(*terms):
  columns = np.zeros((4, 8), np.float32)
  columns[:, 0] = terms
  return columns


def surveyed(terms, contract=combine.C, shared=None, slot_order=(0, 1, 2, 3), **options):
  rows = combine.survey(terms, shared, contract, ORDERS, np.array(slot_order, np.int32), **options)
  table = {(row.topology, row.accumulator): row for row in rows}
  assert len(table) == len(rows)
  return table


def test_topologies_differ_where_bf16_loses_ties():
  table = surveyed(columns_of(1, TIE, TIE, TIE))
  # Exact: 1 + 3 TIE, itself a tie, merged 1 + 2 ULP.
  row = lambda topology, distinct, linf, ulps, mean, certified="", native=False: (
    topology_survey.Row(topology, "bfloat16", 2, distinct, linf, ulps, mean, certified, native)
  )
  expected = [
    row("sequential", 2, 2 * ULP, 2, 2 / 16, 7 / 8),  # 1, and the exact sum
    row("pairwise", 1, ULP, 1, 2 / 16),  # 1 + ULP, in both orders
    *(row(f"expert_parallel/1/{across}", 2, 2 * ULP, 2, 2 / 16) for across in ACROSS),
    *(row(f"expert_parallel/2/{across}", 1, ULP, 1, 2 / 16) for across in ACROSS),
    # One term on each rank: orders do not matter, and chunk 0 of a ring ends at rank 0, with one.
    row("expert_parallel/4/sequential", 1, 2 * ULP, 2, 4 / 16),
    row("expert_parallel/4/tree", 1, ULP, 1, 2 / 16),
    row("expert_parallel/4/ring", 1, 0.0, 0, 0.0, native=True),
    row("expert_parallel/8/sequential", 1, 2 * ULP, 2, 4 / 16),
    row("expert_parallel/8/tree", 1, ULP, 1, 2 / 16),
    row("expert_parallel/8/ring", 1, 0.0, 0, 0.0, native=True),
  ]
  for want in expected:
    assert table.pop((want.topology, "bfloat16")) == want
    found = table.pop((want.topology, "float32"))
    share = 1.0 if want.topology == "sequential" else ""
    assert found == (want.topology, "float32", 2, 1, 0.0, 0, 0.0, share, True)
  # 1 + TIE needs nine bits: one guard bit is enough, E4M3 and E5M2 lose every TIE to one.
  for name in ("float16", *(f"bfloat16+{g}" for g in range(1, 9))):
    found = table.pop(("sequential", name))
    assert found == ("sequential", name, 2, 1, 0.0, 0, 0.0, "", True)
  assert table.pop(("sequential", "bfloat16+0"))[2:] == (2, 2, 2 * ULP, 2, 2 / 16, "", False)
  for name in ("float8_e4m3fn", "float8_e5m2"):
    found = table.pop(("sequential", name))
    assert found == ("sequential", name, 2, 1, 2 * ULP, 2, 4 / 16, "", False)
  assert not table


def test_nothing_differs_on_small_integers():
  terms = np.random.default_rng(5).integers(-1, 3, (4, 8)).astype(np.float32)
  shared = np.arange(8, dtype=np.float32)
  for row in surveyed(terms, shared=shared).values():
    kernel = row.topology == "sequential" and row.accumulator in ("float32", "bfloat16")
    assert row[2:] == (2, 1, 0.0, 0, 0.0, 1.0 if kernel else "", True), row
  assert terms.any(axis=1).all()


def test_outputs_are_counted_after_the_merge():
  # Float32 sums 1 and 1 + 2^-23 are one BF16 value.
  table = surveyed(columns_of(1, 2.0**-24, 2.0**-24, 0))
  row = table["sequential", "float32"]
  assert row.distinct_outputs == 1 and row.certified_share == 7 / 8
  # A contract that keeps float32 tells them apart; ulps stay BF16's.
  kept = dataclasses.replace(combine.C, output="float32")
  row = surveyed(columns_of(1, 2.0**-24, 2.0**-24, 0), kept)["sequential", "float32"]
  assert row[3:7] == (2, 2.0**-23, 0, 0.0)


def test_the_shared_operand_joins_as_the_contract_says():
  terms, shared = columns_of(1, TIE, 0, 0), columns_of(TIE, 0, 0, 0)[0]
  row = surveyed(terms, shared=shared)["sequential", "bfloat16"]
  assert row[3:7] == (1, ULP, 1, 1 / 8) and not row.equals_native  # 1 + ULP, but 1 if TIE is lost
  rounded = dataclasses.replace(combine.C, shared_merge="rounded")
  for alone in (surveyed(terms), surveyed(terms, rounded, shared)):
    row = alone["sequential", "bfloat16"]
    assert row[3:7] == (1, 0.0, 0, 0.0) and row.equals_native


def test_native_is_the_contract_in_its_own_order():
  terms = columns_of(1, TIE, TIE, TIE)
  slots = dataclasses.replace(combine.B, order="slot")
  native = {
    (contract.order, slot_order): surveyed(terms, contract, slot_order=slot_order)
    for contract in (combine.B, slots)
    for slot_order in ((0, 1, 2, 3), (1, 2, 3, 0))
  }
  for (order, slot_order), table in native.items():
    ties_first = order == "slot" and slot_order[0] == 1
    assert table["sequential", "bfloat16"].equals_native == (not ties_first)
    assert table["sequential", "float32"].equals_native == ties_first
    assert table["pairwise", "bfloat16"].equals_native is False
    # Distances do not ask what is native.
    assert table["pairwise", "bfloat16"].linf_max == ULP


def test_ranks_own_experts_by_their_ids():
  terms = columns_of(1, TIE, TIE, TIE)
  far = lambda ids: (
    surveyed(terms, ids=np.array(ids), num_experts=64)[
      "expert_parallel/2/sequential", "bfloat16"
    ].linf_max
  )
  # All on one of two ranks: sequential, but for the rank of one alone. In halves: pairwise.
  assert far([0, 1, 2, 31]) == 2 * ULP
  assert far([31, 32, 33, 63]) == 0
  assert far([0, 31, 32, 63]) == ULP
  for ids, num_experts in (([0, 1, 2, 64], 64), ([0, 1, 2], 64), ([0, 1, 2, 3], None)):
    with pytest.raises(ValueError, match=f"survey: expected 4 ids below num_experts={num_experts}"):
      surveyed(terms, ids=np.array(ids), num_experts=num_experts)


def test_operands_are_the_contracts(monkeypatch):
  # 1 + TIE is no BF16 value: C drops the tie before the sum and P32 keeps it.
  monkeypatch.setattr(topology_survey, "NUM_RANKS", (1,))
  terms = columns_of(1 + TIE, TIE, 0, 0)
  for contract, linf in ((combine.C, 0.0), (combine.P32, ULP)):
    table = surveyed(terms, contract)
    for accumulator in ("float32", "float16", "bfloat16+8"):
      row = table["sequential", accumulator]
      assert (row.linf_max, row.equals_native) == (linf, True)
    assert table["pairwise", "float32"].linf_max == linf


def test_overflow_to_nan_has_no_distance():
  table = surveyed(columns_of(300, 200, -300, 0))
  row = table["sequential", "float8_e4m3fn"]
  assert np.isnan(row.linf_max) and row[5:] == ("", "", "", False)
  assert row.distinct_outputs == 2  # 200 - 300 before 300 is fine
  row = table["sequential", "float16"]
  assert row[3:7] == (1, 0.0, 0, 0.0)
  # Infinity where the exact sum is infinite too is right.
  row = surveyed(columns_of(3e38, 3e38, 0, 0))["sequential", "float32"]
  assert row[3:7] == (1, 0.0, 0, 0.0) and row.equals_native


def test_rings_only_where_chunks_are_equal(monkeypatch):
  monkeypatch.setattr(topology_survey, "NUM_RANKS", (4,))
  terms = np.ones((4, 6), np.float32)
  names = {row.topology for row in combine.survey(terms, None, combine.C, ORDERS, ORDERS[0])}
  parallel = {f"expert_parallel/4/{across}" for across in ("sequential", "tree")}
  assert names == {"sequential", "pairwise", *parallel}


@pytest.mark.parametrize("contract", [combine.C, combine.B], ids=lambda c: c.name)
def test_sequential_rows_against_loops(contract):
  rng = np.random.default_rng(6)
  terms, shared = rng.standard_normal((4, 8)).astype(np.float32), rng.standard_normal(8)
  shared = oracles.to_bf16(shared)
  table = surveyed(terms, contract, shared)
  exact = oracles.to_bf16(oracles.exact_sum(oracles.to_bf16(terms)) + shared)
  for accumulator in ("float32", "bfloat16"):
    sums = [oracles.combine(terms, order, "bfloat16", accumulator) for order in ORDERS]
    merged = oracles.to_bf16(np.stack(sums) + shared)
    steps = np.abs(position(merged) - position(exact))
    row = table["sequential", accumulator]
    assert row.linf_max == np.abs(merged - exact).max()
    assert (row.ulps_max, row.ulps_mean) == (steps.max(), steps.mean())
    assert row.distinct_outputs == len(np.unique(merged, axis=0))
    assert row.equals_native == (accumulator == contract.accumulator)
  assert table["sequential", "bfloat16"].ulps_mean > 0


def position(x):
  """Number of BF16 values between 0 and x, signed."""
  words = x.view(np.uint32).astype(np.int64) >> 16
  return np.where(words >= 1 << 15, -(words - (1 << 15)), words)


def test_bad_surveys_get_one_sentence():
  terms = np.ones((4, 8), np.float32)
  for orders in (ORDERS[:0], ORDERS[:1, :1]):
    with pytest.raises(ValueError, match=r"survey: expected orders \[P, 4\], P ≥ 1"):
      combine.survey(terms, None, combine.C, orders, ORDERS[0])
  with pytest.raises(TypeError, match=r"survey: terms must be float32 \[K, H\], got float64"):
    combine.survey(terms.astype(np.float64), None, combine.C, ORDERS, ORDERS[0])
