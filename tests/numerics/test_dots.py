"""The canonical dots: one bit pattern for every batch, instruction set, thread count and form."""

import hashlib
import os
import pathlib
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax import numerics
from moejax.numerics import dots, dots_xla
from tests import oracles
from tests.oracles import assert_same_bits

ROOT = pathlib.Path(__file__).parents[2]


def bf16(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))


def f32(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


def shapes(rng, count):
  """Random [M, K, N] with ones, empties, primes, and the edges of tiles, strips and blocks."""
  special = [0, 1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 300, 513]
  for _ in range(count):
    m = rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 64, 97])
    k, n = (
      int(rng.choice(special)) if rng.random() < 0.7 else int(rng.integers(1, 600))
      for _ in range(2)
    )
    yield int(m), k, n


# Compiling a program for each shape is what costs.
HOW_MANY = [pytest.param(40, id="some"), pytest.param(200, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", HOW_MANY)
def test_random_shapes_on_every_instruction_set(each_isa, count):
  rng = np.random.default_rng(0)
  for m, k, n in shapes(rng, count):
    a, w = bf16(rng, m, k), bf16(rng, k, n)
    blocked = bool(rng.integers(2))
    expected = oracles.dot(a, w, 256 if blocked else None)
    for _ in each_isa():
      assert_same_bits(numerics.dot(a, w, blocked=blocked), expected)


@pytest.mark.parametrize("count", HOW_MANY)
def test_random_shapes_in_plain_xla(count):
  rng = np.random.default_rng(0)
  for m, k, n in shapes(rng, count):
    a, w = bf16(rng, m, k), bf16(rng, k, n)
    blocked = bool(rng.integers(2))
    assert_same_bits(dots._dot_xla(a, w, blocked), oracles.dot(a, w, 256 if blocked else None))


def test_more_rows_than_a_row_block_and_wide_strips(each_isa):
  rng = np.random.default_rng(1)
  for m, k, n in ((790, 70, 40), (5, 300, 2500), (9, 40, 2300)):
    a, w = bf16(rng, m, k), bf16(rng, k, n)
    expected = oracles.dot(a, w)
    for _ in each_isa():
      assert_same_bits(numerics.dot(a, w), expected)


def test_dot_f32_on_every_instruction_set_and_in_plain_xla(each_isa):
  rng = np.random.default_rng(2)
  for m, k, n in shapes(rng, 20):
    a, w = f32(rng, m, k), f32(rng, k, n)
    expected = oracles.dot(a, w)
    for _ in each_isa():
      assert_same_bits(numerics.dot_f32(a, w), expected)
    assert_same_bits(dots._dot_f32_xla(a, w), expected)


def test_products_of_floats_are_rounded_before_they_are_added():
  a = jnp.array([[1 + 2.0**-12, 1.0]], jnp.float32)
  w = jnp.array([[1 + 2.0**-12], [-1 - 2.0**-11]], jnp.float32)
  # A fused multiply-add would keep 2^-24.
  for product in (numerics.dot_f32, jax.jit(dots_xla.dot_f32)):
    assert float(product(a, w)[0, 0]) == 0.0


def test_rows_of_a_720_row_call_equal_single_row_calls(each_isa):
  rng = np.random.default_rng(3)
  a, w = bf16(rng, 720, 300), bf16(rng, 300, 130)
  for _ in each_isa():
    whole = numerics.dot(a, w)
    for row in (*range(0, 720, 37), 719):
      assert_same_bits(numerics.dot(a[row], w), whole[row])
      assert_same_bits(numerics.dot(a[row : row + 1], w), whole[row : row + 1])


def test_every_way_of_calling():
  rng = np.random.default_rng(4)
  a, w = bf16(rng, 12, 100), bf16(rng, 100, 30)
  many_w = bf16(rng, 5, 100, 30)
  expected = oracles.dot(a, w)
  row = lambda x: numerics.dot(x, w)
  assert_same_bits(numerics.dot(a, w), expected)
  assert_same_bits(jax.jit(lambda a: numerics.dot(a, w))(a), expected)  # w closed over
  assert_same_bits(jax.vmap(row)(a), expected)
  assert_same_bits(jax.jit(jax.vmap(jax.vmap(row)))(a.reshape(3, 4, 100)).reshape(12, 30), expected)
  assert_same_bits(lax.map(row, a), expected)
  assert_same_bits(lax.scan(lambda c, x: (c, row(x)), 0, a)[1], expected)
  assert_same_bits(numerics.dot(a.reshape(3, 2, 2, 100), w).reshape(12, 30), expected)
  over_w = jax.vmap(lambda w: numerics.dot(a, w))(many_w)
  both = jax.vmap(lambda w: jax.vmap(lambda x: numerics.dot(x, w))(a))(many_w)
  for i in range(5):
    assert_same_bits(over_w[i], oracles.dot(a, many_w[i]))
    assert_same_bits(both[i], oracles.dot(a, many_w[i]))


def test_vmap_over_rows_is_one_larger_call():
  rng = np.random.default_rng(4)
  w = bf16(rng, 100, 30)
  program = jax.make_jaxpr(jax.vmap(lambda x: numerics.dot(x, w)))(bf16(rng, 12, 100))
  text = str(program)
  assert text.count("ffi_call[") == 1 and "while" not in text and "scan" not in text


def test_padding_at_the_end_of_k_changes_nothing():
  rng = np.random.default_rng(5)
  a, w = bf16(rng, 9, 77), bf16(rng, 77, 40)
  padded = numerics.dot(jnp.pad(a, ((0, 0), (0, 90))), jnp.pad(w, ((0, 90), (0, 0))))
  assert_same_bits(padded, numerics.dot(a, w))


def batched_oracle(a, w, lengths, transposed):
  """Row by row: only the valid entries are ever touched."""
  a, w, lengths = np.asarray(a), np.asarray(w), np.asarray(lengths)
  n = w.shape[-2] if transposed else w.shape[-1]
  out = np.zeros((*a.shape[:-1], n), np.float32)
  for at in np.ndindex(*lengths.shape):
    valid, matrix = lengths[at], w[at[:-1]]
    if transposed:
      out[at][:valid] = oracles.dot(a[at][None], matrix[:valid].T)[0]
    else:
      out[at] = oracles.dot(a[at][None, :valid], matrix[:valid])[0]
  return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
  "batch,m,k,n", [((2, 3), 1, 17, 40), ((4,), 24, 33, 20), ((), 64, 100, 70), ((3,), 5, 1, 1)]
)
def test_batched_dot_reads_nothing_beyond_its_lengths(each_isa, batch, m, k, n, transposed):
  rng = np.random.default_rng(6)
  a = np.array(bf16(rng, *batch, m, k))
  w = np.array(bf16(rng, *batch, *((n, k) if transposed else (k, n))))
  cache = w.shape[-2]
  lengths = rng.integers(0, cache + 1, (*batch, m)).astype(np.int32)
  # Rubbish beyond the longest row of each batch entry, and beyond each row's own length in a.
  longest = lengths.max(axis=-1)
  w[np.arange(cache) >= longest[..., None]] = np.nan
  if not transposed:
    a[np.arange(k) >= lengths[..., None]] = np.nan
  expected = batched_oracle(a, w, lengths, transposed)
  assert not np.isnan(expected).any()
  operands = (jnp.asarray(a), jnp.asarray(w), jnp.asarray(lengths))
  for _ in each_isa():
    assert_same_bits(numerics.batched_dot(*operands, transposed=transposed), expected)
  assert_same_bits(dots._batched_dot_xla(*operands, transposed), expected)


def test_a_nan_another_row_may_read_does_not_reach_a_shorter_row():
  a = jnp.ones((2, 4), jnp.bfloat16)
  values = jnp.array([[1.0], [2.0], [np.nan], [4.0]], jnp.bfloat16)
  out = np.asarray(numerics.batched_dot(a, values, jnp.array([2, 4], jnp.int32)))
  assert out[0, 0] == 3.0 and np.isnan(out[1, 0])


def test_batched_dot_without_lengths_and_under_vmap():
  rng = np.random.default_rng(7)
  a, w = bf16(rng, 3, 5, 20), bf16(rng, 3, 20, 9)
  lengths = jnp.asarray(rng.integers(0, 21, (3, 5)), jnp.int32)
  for i in range(3):
    assert_same_bits(numerics.batched_dot(a, w)[i], oracles.dot(a[i], w[i]))
  expected = numerics.batched_dot(a, w, lengths)
  assert_same_bits(jax.vmap(numerics.batched_dot)(a, w, lengths), expected)
  one_length = jax.vmap(numerics.batched_dot, in_axes=(0, 0, None))(a, w, jnp.int32(7))
  assert_same_bits(one_length, numerics.batched_dot(a, w, jnp.full((3, 5), 7, jnp.int32)))


def test_grouped_rows_equal_single_row_calls(each_isa):
  rng = np.random.default_rng(8)
  for tokens, slots, experts, k, n in ((13, 3, 5, 40, 33), (1, 6, 32, 257, 64), (70, 2, 3, 30, 20)):
    w = bf16(rng, experts, k, n)
    ids = jnp.asarray(rng.integers(-1, experts + 1, (tokens, slots)), jnp.int32)
    for x in (bf16(rng, tokens, k), bf16(rng, tokens, slots, k)):
      expected = np.zeros((tokens, slots, n), np.float32)
      for t, s in np.ndindex(tokens, slots):
        if 0 <= ids[t, s] < experts:
          row = x[t] if x.ndim == 2 else x[t, s]
          expected[t, s] = oracles.dot(row[None], w[int(ids[t, s])])[0]
      for _ in each_isa():
        assert_same_bits(numerics.grouped_dot(x, w, ids), expected)
      rows = x[:, None] if x.ndim == 2 else x
      assert_same_bits(dots._grouped_dot_xla(rows, w, ids), expected)


def test_grouped_dot_under_vmap():
  rng = np.random.default_rng(9)
  x, w = bf16(rng, 4, 6, 20), bf16(rng, 3, 20, 8)
  ids = jnp.asarray(rng.integers(0, 3, (4, 6, 2)), jnp.int32)
  lanes = jax.vmap(numerics.grouped_dot, in_axes=(0, None, 0))(x, w, ids)
  per_lane_w = jax.vmap(numerics.grouped_dot)(x, jnp.stack([w] * 4), ids)
  for lane in range(4):
    assert_same_bits(lanes[lane], numerics.grouped_dot(x[lane], w, ids[lane]))
    assert_same_bits(per_lane_w[lane], lanes[lane])


def test_the_other_dots_called_every_way():
  rng = np.random.default_rng(10)
  keys, values, lengths = bf16(rng, 4, 9, 20), bf16(rng, 4, 9, 7), jnp.array([[9], [0], [4], [1]])
  x, experts = bf16(rng, 4, 6, 20), bf16(rng, 3, 20, 8)
  ids = jnp.asarray(rng.integers(-1, 3, (4, 6, 2)), jnp.int32)
  f32_rows, f32_w = f32(rng, 4, 5, 20), f32(rng, 20, 7)
  lengths = lengths.astype(jnp.int32)

  def every_dot(query, key, value, length, x, ids, row):
    return (
      numerics.batched_dot(query, key, length, transposed=True),
      numerics.batched_dot(query[:, :9], value, length),
      numerics.grouped_dot(x, experts, ids),
      numerics.dot_f32(row, f32_w),
    )

  lanes = (bf16(rng, 4, 1, 20), keys, values, lengths, x, ids, f32_rows)
  eager = [every_dot(*(lane[i] for lane in lanes)) for i in range(4)]
  expected = [np.stack(parts) for parts in zip(*eager)]
  scanned = lax.scan(lambda carry, lane: (carry, every_dot(*lane)), 0, lanes)[1]
  mapped = lax.map(lambda lane: every_dot(*lane), lanes)
  for got in (jax.vmap(every_dot)(*lanes), jax.jit(jax.vmap(every_dot))(*lanes), scanned, mapped):
    for out, want in zip(got, expected):
      assert_same_bits(out, want)
  for i in range(4):
    assert_same_bits(expected[3][i], oracles.dot(f32_rows[i], f32_w))


def test_sharded_rows_keep_their_bits():
  code = """
import os
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from moejax import numerics
rng = np.random.default_rng(0)
a = jnp.asarray(rng.standard_normal((8, 100)), jnp.bfloat16)
w = jnp.asarray(rng.standard_normal((100, 30)), jnp.bfloat16)
mesh = Mesh(np.array(jax.devices()), ('rows',))
f = jax.shard_map(
  numerics.dot, mesh=mesh, in_specs=(P('rows'), P()), out_specs=P('rows'), check_vma=False
)
assert jax.device_count() == 4
assert np.asarray(jax.jit(f)(a, w)).tobytes() == np.asarray(numerics.dot(a, w)).tobytes()
"""
  flags = "--xla_force_host_platform_device_count=4"
  run = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "XLA_FLAGS": flags},
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0, run.stderr


def test_custom_calls_keep_subnormals_where_plain_xla_flushes():
  a, w = jnp.full((1, 1), 2.0**-70, jnp.bfloat16), jnp.full((1, 1), 2.0**-70, jnp.bfloat16)
  assert float(np.asarray(numerics.dot(a, w))[0, 0]) == 2.0**-140
  assert float(np.asarray(dots._dot_xla(a, w, False))[0, 0]) == 0.0
  x, y = (jnp.full((1, 1), value, jnp.float32) for value in (2.0**-100, 2.0**-40))
  assert float(np.asarray(numerics.dot_f32(x, y))[0, 0]) == 2.0**-140


STORE = """
import hashlib, os, sys
if sys.argv[1] != 'all': os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np, jax, jax.numpy as jnp
from moejax import combine, numerics
rng = np.random.default_rng(0)
a, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((70, 600), (600, 500)))
ids = jnp.asarray(rng.integers(0, 4, (70, 3)), jnp.int32)
experts = jnp.asarray(rng.standard_normal((4, 600, 64)), jnp.bfloat16)
terms = jnp.asarray(rng.standard_normal((6, 4096)), jnp.float32)
x = numerics.rms_norm(numerics.dot(a, w), eps=1e-6)
np.savez(
  sys.argv[2], x, numerics.softmax(x), numerics.silu(x), numerics.grouped_dot(a, experts, ids),
  *(combine.combine_all_orders(terms, c)[1] for c in combine.SCHEMES.values()),
  combine.all_orders_fingerprints(terms, combine.B)[1],
)
stored = hashlib.sha256(open(sys.argv[2], 'rb').read()).hexdigest()
print(numerics.probe_environment().threads, stored)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no processor affinity here")
def test_two_processes_and_two_thread_counts_store_the_same_file(tmp_path):
  printed = [
    subprocess.run(
      [sys.executable, "-c", STORE, cpus, str(tmp_path / f"{i}.npz")],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.split()
    for i, cpus in enumerate(("one", "all", "all"))
  ]
  assert printed[0][0] == "1"
  if len(os.sched_getaffinity(0)) > 1:
    assert int(printed[1][0]) > 1
  assert len({digest for _, digest in printed}) == 1
  assert len(printed[0][1]) == len(hashlib.sha256().hexdigest())


@pytest.mark.parametrize(
  "call,error,message",
  [
    (
      lambda a, w: numerics.dot(a.astype(jnp.float32), w),
      TypeError,
      "dot: a must be bfloat16, got float32",
    ),
    (
      lambda a, w: numerics.dot(a, np.zeros((4, 3))),
      TypeError,
      "dot: w must be bfloat16, got float64",
    ),
    (
      lambda a, w: numerics.dot(a, w[:3]),
      ValueError,
      r"last axis of a \(2, 4\) must match .* \(3, 5\)",
    ),
    (lambda a, w: numerics.dot(a, w[0]), ValueError, "must match the second to last of w"),
    (lambda a, w: numerics.dot_f32(a, w), TypeError, "dot_f32: a must be float32, got bfloat16"),
    (lambda a, w: numerics.batched_dot(a[None], jnp.stack([w, w])), ValueError, "leading axes"),
    (lambda a, w: numerics.batched_dot(a, w, 3), TypeError, "lengths must be int32, got int"),
    (
      lambda a, w: numerics.grouped_dot(a, w, jnp.zeros((2, 1), jnp.int32)),
      ValueError,
      "grouped_dot: expected x",
    ),
    (
      lambda a, w: numerics.grouped_dot(a, w[None], jnp.zeros((2, 1))),
      TypeError,
      "ids must be int32, got float32",
    ),
  ],
)
def test_bad_operands_get_one_sentence(call, error, message):
  a, w = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)
  with pytest.raises(error, match=message):
    call(a, w)
