"""MOEJAX_CHECK_DOMAIN names the row that leaves the domain, and changes no bit inside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine, numerics
from tests.oracles import assert_same_bits

TINY = 2.0**-70  # its square is below 2^-126


@pytest.fixture(autouse=True)
def _checking(monkeypatch):
  monkeypatch.setenv("MOEJAX_CHECK_DOMAIN", "1")


def bf16(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def test_checked_results_have_the_same_bits(monkeypatch):
  rng = np.random.default_rng(0)
  a, w = bf16(rng, 2, 3, 300), bf16(rng, 300, 7)
  keys, lengths = bf16(rng, 2, 9, 300), jnp.array([[1, 9, 0], [3, 4, 5]], jnp.int32)
  values = bf16(rng, 2, 300, 7)
  x, experts = bf16(rng, 5, 20), bf16(rng, 3, 20, 8)
  ids = jnp.array([[0, 1], [2, -1], [1, 1], [0, 3], [2, 0]], jnp.int32)
  row = jnp.asarray(rng.standard_normal((4, 37)), jnp.float32)

  def everything():
    return (
      numerics.dot(a, w),
      numerics.dot(a, w, blocked=True),
      jax.vmap(lambda x: numerics.dot(x, w))(a),
      numerics.dot_f32(row, row.T),
      numerics.batched_dot(a, keys, lengths, transposed=True),
      numerics.batched_dot(a, values, 50 * lengths),
      numerics.grouped_dot(x, experts, ids),
      jax.vmap(lambda x, i: numerics.grouped_dot(x[None], experts, i[None]))(x, ids),
      numerics.tree_sum(row),
      numerics.rms_norm(row, eps=1e-6),
    )

  checked = everything()
  monkeypatch.setenv("MOEJAX_CHECK_DOMAIN", "0")
  for got, expected in zip(checked, everything()):
    assert_same_bits(got, expected)


@pytest.mark.parametrize("blocked", [False, True])
def test_a_small_product_names_its_row(blocked):
  a = jnp.ones((5, 4), jnp.bfloat16).at[3, 2].set(TINY)
  w = jnp.ones((4, 6), jnp.bfloat16).at[2, 1].set(TINY)
  sentence = r"dot: row 3, column 1: the product at k = 2 is .* below 2\^-126"
  with pytest.raises(numerics.DomainError, match=sentence):
    numerics.dot(a, w, blocked=blocked)
  with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
    jax.block_until_ready(jax.jit(lambda a, w: numerics.dot(a, w, blocked=blocked))(a, w))


def test_a_small_partial_sum_names_its_row():
  a = jnp.array([[1, 1], [1.5 * 2.0**-126, -(2.0**-126)]], jnp.float32)
  w = jnp.ones((2, 1), jnp.float32)
  with pytest.raises(
    numerics.DomainError, match=r"dot_f32: row 1, column 0: the partial sum at k = 1"
  ):
    numerics.dot_f32(a, w)


def test_batched_and_grouped_dots_name_their_rows():
  a = jnp.ones((2, 3, 4), jnp.bfloat16).at[1, 2, 3].set(TINY)
  w = jnp.ones((2, 4, 5), jnp.bfloat16).at[1, 3].set(TINY)
  with pytest.raises(numerics.DomainError, match="batched_dot: row 1, 2, column 0"):
    numerics.batched_dot(a, w)
  # Beyond a row's length nothing is read, so nothing is refused.
  numerics.batched_dot(a, w, jnp.int32(3))
  x = jnp.ones((3, 4), jnp.bfloat16).at[2, 3].set(TINY)
  ids = jnp.array([[0], [1], [1]], jnp.int32)
  with pytest.raises(numerics.DomainError, match="grouped_dot: token 2, slot 0"):
    numerics.grouped_dot(x, w, ids)


def test_row_sums_name_their_row():
  x = (
    jnp.ones((3, 5), jnp.float32)
    .at[1, :]
    .set(0)
    .at[1, 3]
    .set(2.0**-126)
    .at[1, 1]
    .set(-1.5 * 2.0**-126)
  )
  with pytest.raises(numerics.DomainError, match="tree_sum: row 1"):
    numerics.tree_sum(x)
  numerics.rms_norm(x, eps=1e-6)  # eps swallows what XLA flushes


def test_sums_of_a_combine_name_their_row():
  small = jnp.array([0, 2.0**-125, -1.25 * 2.0**-125], jnp.float32)
  terms = jnp.ones((2, 3, 4), jnp.float32).at[1, :, 2].set(small)
  orders = jnp.array([[0, 1, 2], [2, 1, 0]], jnp.int32)
  codes = jnp.zeros(2, jnp.int32)
  sentence = r"combine_rows: row 1, column 2: the partial sum 2 is .* below 2\^-126"
  with pytest.raises(numerics.DomainError, match=sentence):
    combine.combine_rows(terms, orders, codes)
  lanes = jax.vmap(combine.combine_rows)
  with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
    jax.block_until_ready(jax.jit(lanes)(terms, orders, codes))


def test_checked_combines_have_the_same_bits(monkeypatch):
  rng = np.random.default_rng(1)
  terms = jnp.asarray(rng.standard_normal((6, 50)), jnp.float32)
  orders = jnp.asarray(combine.all_orders(6)[::90])
  lanes = jax.vmap(lambda order: combine.combine(terms, order, combine.B))
  checked = lanes(orders)
  monkeypatch.setenv("MOEJAX_CHECK_DOMAIN", "0")
  assert_same_bits(checked, lanes(orders))
