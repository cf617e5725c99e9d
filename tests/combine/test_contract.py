"""The contract record: its schemes, what a runtime's own contract inherits, the shared merge."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine
from tests import oracles
from tests.oracles import assert_same_bits


def test_the_four_schemes_are_the_papers():
  table = {name: (c.operand, c.accumulator) for name, c in combine.SCHEMES.items()}
  assert table == {
    "P32": ("float32", "float32"),
    "C": ("bfloat16", "float32"),
    "A": ("float32", "bfloat16"),
    "B": ("bfloat16", "bfloat16"),
    "EXACT": ("bfloat16", "exact"),
  }


def test_codes_are_distinct_and_stable():
  # Codes are stored in records and compiled into kernels.
  assert {c.name: c.code for c in combine.SCHEMES.values()} == {
    "P32": 0,
    "C": 1,
    "A": 2,
    "B": 3,
    "EXACT": 5,
  }


def test_a_scheme_replaces_only_precision():
  native = combine.Contract(
    "qwen2",
    operand="bfloat16",
    accumulator="float32",
    gate_point="after_down",
    gate_dtype="bfloat16",
    order="slot",
    shared_merge="rounded",
  )
  replaced = native.with_scheme(combine.A)
  assert (replaced.operand, replaced.accumulator) == ("float32", "bfloat16")
  assert (
    dataclasses.replace(
      replaced, name=native.name, operand=native.operand, accumulator=native.accumulator
    )
    == native
  )


def test_contracts_are_hashable_values():
  assert len({combine.B, dataclasses.replace(combine.B), combine.A}) == 2


@pytest.mark.parametrize("merge", ["accumulator", "rounded"])
@pytest.mark.parametrize("output", ["bfloat16", "float32"])
def test_shared_merge_rounds_where_the_contract_says(merge, output):
  rng = np.random.default_rng(0)
  routed = rng.standard_normal((5, 100)).astype(np.float32)
  shared = oracles.to_bf16(rng.standard_normal((5, 100)))
  contract = dataclasses.replace(combine.C, shared_merge=merge, output=output)
  want = (oracles.to_bf16(routed) if merge == "rounded" else routed) + shared
  alone = routed
  if output == "bfloat16":
    want, alone = oracles.to_bf16(want), oracles.to_bf16(routed)
  operands = (jnp.asarray(routed), jnp.asarray(shared))
  assert_same_bits(combine.merge_shared(*operands, contract), want)
  assert_same_bits(jax.jit(combine.merge_shared, static_argnums=2)(*operands, contract), want)
  assert_same_bits(jax.vmap(lambda r, s: combine.merge_shared(r, s, contract))(*operands), want)
  assert_same_bits(combine.merge_shared(operands[0], None, contract), alone)


def test_the_two_merges_differ():
  rng = np.random.default_rng(0)
  routed = jnp.asarray(rng.standard_normal(1000), jnp.float32)
  shared = jnp.asarray(oracles.to_bf16(rng.standard_normal(1000)))
  once, twice = (
    np.asarray(combine.merge_shared(routed, shared, dataclasses.replace(combine.C, shared_merge=m)))
    for m in ("accumulator", "rounded")
  )
  assert (once != twice).any()


@pytest.mark.parametrize(
  "make,message",
  [
    (lambda: combine.named("D"), "unknown contract 'D': expected one of P32, C, A, B, EXACT"),
    (
      lambda: combine.Contract("x", operand="float16", accumulator="float32"),
      "operand must be one of float32, bfloat16, got 'float16'",
    ),
    (
      lambda: combine.Contract("x", "float32", "float32", gate_point="late"),
      "gate_point must be one of",
    ),
    (lambda: combine.fixed_tree(((0, 1), 1)), "leaves must be 0 .. k-1, once each"),
    (lambda: combine.expert_parallel(0), "num_ranks must be at least 1"),
    (lambda: combine.expert_parallel(2, "star"), "across must be one of sequential, tree, ring"),
    (lambda: combine.expert_parallel(2, partial="fp8"), "partial must be float32 or bfloat16"),
  ],
)
def test_unknown_names_get_one_sentence(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_named_finds_every_scheme():
  assert all(combine.named(name) is contract for name, contract in combine.SCHEMES.items())
