"""The packed quantiser: a scalar loop as oracle, the simulated one, the same bits everywhere."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.numerics import backend, packed, quantize
from tests.oracles import assert_same_bits, to_bf16
from tests.ways import normal_rows, runs

BITS = (4, 3, 2)
NAMES = ("numpy", "eager", "jit", "vmap", "scan")
BF16 = ml_dtypes.bfloat16
quantize_jit = jax.jit(packed.quantize_packed, static_argnums=(1, 2))


def arrays(p):
  return {name: np.asarray(getattr(p, name)) for name in ("codes", "scale", "zero")}


def assert_same(actual, expected):
  """Equal arrays, bit for bit, and equal settings."""
  assert (actual.bits, actual.group) == (expected.bits, expected.group)
  for name, array in arrays(expected).items():
    found = arrays(actual)[name]
    assert (found.dtype, found.shape) == (array.dtype, array.shape), name
    words = f"u{array.itemsize}"
    np.testing.assert_array_equal(found.view(words), array.view(words), err_msg=name)


def read(p):
  """What is read back, by NumPy."""
  return packed.dequantize_packed(jax.tree.map(np.asarray, p))


# Codes and bytes


def stream(codes, bits):
  """The bytes of one row, from one long integer."""
  number = sum(int(code) << bits * i for i, code in enumerate(codes))
  return np.frombuffer(number.to_bytes(-(-len(codes) * bits // 8), "little"), np.uint8)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_in_every_place_is_packed_and_back(bits):
  # Row by row, each code passes through each place.
  width = 2**bits + 3
  codes = (np.arange(width)[:, None] * 7 + np.arange(width)) % 2**bits
  codes = codes.astype(np.uint8)
  assert all(set(column) == set(range(2**bits)) for column in codes.T)
  for n in (1, 2, 3, 5, 7, width):
    expected = np.stack([stream(row, bits) for row in codes[:, :n]])
    for name in ("numpy", "jit", "vmap") if n == width else ("numpy",):
      found = runs(lambda codes: packed.pack_codes(codes, bits))[name](codes[:, :n])
      np.testing.assert_array_equal(found, expected)
      found = runs(lambda data: packed.unpack_codes(data, bits, n))[name](expected)
      np.testing.assert_array_equal(found, codes[:, :n])
      assert found.dtype == np.uint8


def test_the_layout_in_bytes():
  codes = np.uint8([1, 2, 3, 0, 1])
  assert packed.pack_codes(codes, 4).tolist() == [0x21, 0x03, 0x01]
  assert packed.pack_codes(codes, 2).tolist() == [0b00_11_10_01, 0b01]
  eight = np.uint8([1, 2, 3, 4, 5, 6, 7, 0])
  assert packed.pack_codes(eight, 3).tolist() == [0b11_010_001, 0b0_101_100_0, 0b000_111_11]


def test_codes_that_are_too_large():
  codes = np.uint8([[3, 4, 1]])
  with pytest.raises(ValueError, match="pack_codes: expected codes below 4, got 4"):
    packed.pack_codes(codes, 2)
  np.testing.assert_array_equal(packed.pack_codes(jnp.asarray(codes), 2), [[0b01_00_11]])


# The algorithm, one float32 operation at a time


def tree_sum(terms):
  terms = [*terms, *[np.float32(0)] * ((1 << (len(terms) - 1).bit_length()) - len(terms))]
  while len(terms) > 1:
    half = len(terms) // 2
    terms = [terms[i] + terms[half + i] for i in range(half)]
  return terms[0] + np.float32(0)


def round_bf16(value):
  return np.float32(to_bf16(value))


def encode(x, scale, zero, top):
  whole, divisor = np.rint(zero), scale if scale else np.float32(1)
  codes = (np.rint(v / divisor + (zero - whole)) + whole for v in x)
  return [min(max(code, np.float32(0)), np.float32(top)) for code in codes]


def decode(codes, scale, zero):
  return [round_bf16(round_bf16(code - zero) * scale) for code in codes]


def next_zero(x, scale, zero, top):
  terms = []
  for v, code in zip(x, encode(x, scale, zero, top)):
    r = v - (code - zero) * scale
    e = np.float32(0)
    if r != 0:
      e = max(abs(r) - np.float32(1) / (np.float32(10) * np.sqrt(abs(r))), np.float32(0))
    terms.append(code - (v - np.copysign(e, r)) / (scale if scale else np.float32(1)))
  return tree_sum(terms) / np.float32(len(x))


def quantize_group(x, bits, steps=20):
  """(codes, scale, zero, what is read back) of one group of float32."""
  top, low, high = 2**bits - 1, min(x), max(x)
  if low == high:
    scale, zero = round_bf16(abs(high)), np.float32(-np.sign(high))
  else:
    scale = round_bf16((high - low) / np.float32(top))
    zero = -low / scale
  best_error = np.float32(np.inf)
  for _ in range(steps + 1):
    stored = round_bf16(zero) + np.float32(0)
    values = decode(encode(x, scale, stored, top), scale, stored)
    error = tree_sum([abs(v - value) for v, value in zip(x, values)])
    if error < best_error:
      best_zero, best_error = stored, error
    zero = next_zero(x, scale, zero, top)
  codes = encode(x, scale, best_zero, top)
  return codes, scale, best_zero, decode(codes, scale, best_zero)


def quantize_by_loop(x, bits, group, steps=20):
  """(Packed, what is read back)."""
  rows = [quantize_group(row, bits, steps) for row in x.reshape(-1, group)]
  codes, scale, zero, values = (np.array(part, np.float32) for part in zip(*rows))
  lead, n = x.shape[:-1], x.shape[-1]
  codes = np.stack([stream(row, bits) for row in codes.reshape(-1, n)])
  scale, zero = (v.reshape(*lead, n // group).astype(BF16) for v in (scale, zero))
  codes = codes.reshape(*lead, -1)
  return packed.Packed(codes, scale, zero, bits, group), values.reshape(x.shape)


def ordinary(group, count=16):
  """[count, 2 · group]: BF16 and float32 values, large channels, offsets, signs, few values."""
  x = np.random.default_rng(group).standard_normal((count, 2 * group), np.float32)
  x[::2] = to_bf16(x[::2])
  x[1:3, ::3] *= 8  # as keys have them
  x[3] = np.abs(x[3]) + 5
  x[4] = -np.abs(x[4])
  x[5] = np.round(x[5])
  x[6:10] *= np.float32([[0.01], [1e-6], [30], [4e9]])  # none, none, most and all of e is not 0
  return x


@pytest.mark.parametrize(("bits", "group"), [(4, 8), (3, 8), (2, 8), (4, 11), (2, 3), (3, 1)])
def test_quantize_packed_is_the_scalar_loop(bits, group):
  x = ordinary(group).reshape(2, 8, -1)
  expected, values = quantize_by_loop(x, bits, group)

  def there_and_back(x):
    quantized = packed.quantize_packed(x, bits, group)
    return quantized, packed.dequantize_packed(quantized)

  for name in NAMES if (bits, group) == (4, 8) else ("numpy", "jit") if group == 8 else ("numpy",):
    found, found_values = runs(there_and_back)[name](x)
    assert_same(found, expected)
    assert_same_bits(found_values, values)


def test_one_step_in_float32():
  """BF16 would hide most of what a compiler can change."""
  x = np.random.default_rng(2).standard_normal((11, 400), np.float32) * np.float32(30)
  scale = to_bf16(np.ptp(x, axis=0, keepdims=True) / 7)
  zero = -x.min(axis=0, keepdims=True) / scale
  expected = [next_zero(*parts, 7) for parts in zip(x.T, scale[0], zero[0])]
  improve = jax.jit(packed._improve, static_argnums=(0, 4))
  for step, b in ((packed._improve, backend.NumpyBackend), (improve, backend.XlaBackend)):
    assert_same_bits(step(b, x, scale, zero, 7).ravel(), expected)


def test_the_steps_matter_to_the_oracle():
  """Half-quadratic steps change zero points, some of them through e."""
  x = ordinary(8)
  zero = quantize_by_loop(x, 2, 8)[0].zero
  assert np.mean(zero != quantize_by_loop(x, 2, 8, steps=0)[0].zero) > 0.5
  small = x * np.float32(2.0**-10)  # all errors below 0.21
  assert (zero != quantize_by_loop(small, 2, 8)[0].zero).any()


def test_no_shape_changes_a_bit():
  x = ordinary(8, 60).reshape(3, 4, 5, 16)
  whole = quantize_jit(x, 4, 8)

  def part(at):
    return jax.tree.map(lambda array: array[at], whole)

  assert_same(quantize_jit(x[1], 4, 8), part(1))
  for token in np.ndindex(3, 4, 5):
    assert_same(quantize_jit(x[token], 4, 8), part(token))
  over_heads = jax.vmap(lambda x: packed.quantize_packed(x, 4, 8), in_axes=1, out_axes=1)
  assert_same(jax.jit(jax.vmap(over_heads))(x), whole)
  assert_same_bits(jax.jit(jax.vmap(packed.dequantize_packed))(whole), read(whole))
  empty = packed.quantize_packed(np.zeros((0, 16), np.float32), 4, 8)
  assert read(empty).shape == (0, 16)


# Special groups


def test_a_group_of_one_value_is_exact_up_to_bf16():
  rng = np.random.default_rng(5)
  values = rng.standard_normal(200, np.float32) * np.exp2(rng.uniform(-50, 50, 200))
  values = np.r_[values, 1, -1, 1 + 2.0**-8, -(1 + 3 * 2.0**-8)].astype(np.float32)
  x = np.repeat(values[:, None], 6, axis=1)
  for bits in BITS:
    p = packed.quantize_packed(x, bits, 6)
    assert_same_bits(read(p), to_bf16(x))
    assert_same_bits(p.scale.astype(np.float32)[:, 0], to_bf16(np.abs(values)))
    assert_same_bits(p.zero.astype(np.float32)[:, 0], -np.sign(values))
  assert_same(quantize_jit(x, bits, 6), p)


def test_zeros_are_plus_zero():
  x = np.float32([[0] * 4, [-0.0] * 4, [0, -0.0, 0, 0], [-0.0, 0, 1, 0], [0, -0.0, -1, 0]])
  for run in (packed.quantize_packed, quantize_jit):
    p = run(x, 3, 4)
    assert not np.signbit(np.asarray(p.zero).astype(np.float32)).any()
    assert_same_bits(read(p), x + np.float32(0))


@pytest.mark.parametrize("huge", [1.3e36, -1.3e36])
def test_one_huge_value_does_not_overflow(huge):
  x = np.random.default_rng(6).standard_normal((3, 16), np.float32) * np.float32(2.0**40)
  x[0, 3] = x[1, 15] = huge
  for bits in BITS:
    p = packed.quantize_packed(x, bits, 16)
    if bits == 2:
      assert_same(quantize_jit(x, bits, 16), p)
    step = np.asarray(p.scale).astype(np.float64)
    assert (np.abs(read(p) - x.astype(np.float64)) <= 0.51 * step + np.abs(x) / 64).all()


# Given scales and zero points


def symmetric(x, bits, group):
  """The grid of fake_quantize: its delta, in float32, and the middle code."""
  largest = np.abs(x).reshape(*x.shape[:-1], -1, group).max(axis=-1)
  scale = largest / np.float32(2 ** (bits - 1) - 1)
  return scale, np.full_like(scale, 2 ** (bits - 1))


def grid_rows(top):
  """[n, 8]: ties, the values next to them, full scale of both signs, zeros, one huge value."""
  ties = np.resize(np.arange(top) + np.float32(0.5), 7)
  ties[::2] *= -1
  rows = [np.r_[sign * top, edge] for sign in (1, -1) for edge in (ties, -ties)]
  rows += [np.r_[top, np.nextafter(ties, np.float32(end))] for end in (0, np.inf, -np.inf)]
  rows += [np.r_[-top, np.full(7, -0.4)], [0] * 8, [-0.0] * 8, np.r_[2.0**100, ties]]
  return np.array(rows, np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [8, 4, 1])
def test_a_symmetric_grid_is_fake_quantize_in_bf16(bits, group):
  rows = grid_rows(2 ** (bits - 1) - 1)
  x = np.concatenate([rows, rows * np.float32(0.37), rows * np.float32(2.0**-9)])
  x = np.concatenate([x, normal_rows(7, (300, 8)), to_bf16(normal_rows(8, (300, 8)))])
  if group == 1:
    x = x[..., :1]  # heads of one channel
  scale, zero = symmetric(x, bits, group)
  # + 0: where fake_quantize gives -0, a code gives +0.
  expected = to_bf16(quantize.fake_quantize(x, bits, group=group) + np.float32(0))

  def there_and_back(x, scale, zero):
    return packed.dequantize_packed(packed.quantize_with(x, scale, zero, bits, group))

  for name in ("numpy", "jit", "vmap") if bits == 4 else ("numpy",):
    assert_same_bits(runs(there_and_back)[name](x, scale, zero), expected)


def test_quantize_with_keeps_what_it_is_given():
  x = ordinary(8)
  p = packed.quantize_packed(x, 4, 8)
  assert_same(packed.quantize_with(x, p.scale, p.zero, 4, 8), p)
  wide = packed.quantize_with(x, p.scale.astype(np.float32), p.zero, 4, 8)
  assert (wide.scale.dtype, wide.zero.dtype) == (np.float32, BF16)
  np.testing.assert_array_equal(wide.codes, p.codes)
  assert_same_bits(read(wide), read(p))


# Error and size


# Relative errors of the library (hqq 0.2.8, 64 channels of one head, zero point and scale in BF16).
@pytest.mark.parametrize(("bits", "of_library"), [(4, 0.086), (3, 0.182), (2, 0.432)])
def test_error_on_gaussian_values(bits, of_library):
  x = to_bf16(np.random.default_rng(9).standard_normal((512, 128), np.float32))
  p = packed.quantize_packed(x, bits, 64)
  assert np.linalg.norm(read(p) - x) / np.linalg.norm(x) < 1.02 * of_library

  def error(y):
    return np.abs(y - x).reshape(-1, 64).astype(np.float64).sum(axis=-1)

  scale = p.scale.astype(np.float32)
  start = (-x.reshape(512, 2, 64).min(axis=-1) / scale).astype(BF16)
  plain = error(read(packed.quantize_with(x, p.scale, start, bits, 64)))
  found = error(read(p))
  assert (found <= plain * 1.000001).all()
  assert found.sum() < 0.97 * plain.sum()
  assert found.sum() < 0.81 * error(quantize.fake_quantize(x, bits, group=64)).sum()


@pytest.mark.parametrize(("bits", "row"), [(4, 64), (3, 48), (2, 32)])
def test_bytes_held(bits, row):
  x = ordinary(64, 30).reshape(2, 3, 5, 128)
  p = packed.quantize_packed(x, bits, 64)
  assert (p.shape, p.codes.shape) == (x.shape, (2, 3, 5, row))
  for held in (p, jax.tree.map(jnp.asarray, p)):
    assert packed.packed_nbytes(held) == 30 * (128 * bits // 8 + 2 * 4)
  odd = packed.quantize_packed(x[..., :5], bits, 5)
  assert packed.packed_nbytes(odd) == 30 * (-(-5 * bits // 8) + 4)


def test_refusals():
  x = np.ones((2, 6), np.float32)
  codes, scale = np.zeros((2, 6), np.uint8), np.ones((2, 2), np.float32)
  for name, call in {
    "quantize_packed": lambda x, bits, group: packed.quantize_packed(x, bits, group),
    "quantize_with": lambda x, bits, group: packed.quantize_with(x, scale, scale, bits, group),
  }.items():
    with pytest.raises(TypeError, match=f"{name}: expected a float32 array, got float64"):
      call(x.astype(np.float64), 4, 3)
    with pytest.raises(ValueError, match=f"{name}: bits must be 2, 3 or 4, got 5"):
      call(x, 5, 3)
    for group in (4, 0):
      with pytest.raises(ValueError, match=f"{name}: groups of {group} do not divide an axis of 6"):
        call(x, 4, group)
    with pytest.raises(ValueError, match=f"{name}: expected x .* got a scalar"):
      call(np.float32(1), 4, 1)
  with pytest.raises(TypeError, match="scale must be float32 or bfloat16, got float16"):
    packed.quantize_with(x, scale.astype(np.float16), scale, 4, 3)
  with pytest.raises(ValueError, match=r"groups of 3 needs zero \(2, 2\), got \(2, 1\)"):
    packed.quantize_with(x, scale, scale[:, :1], 4, 3)
  for bits in (1, 8):
    with pytest.raises(ValueError, match=f"pack_codes: bits must be 2, 3 or 4, got {bits}"):
      packed.pack_codes(codes, bits)
    with pytest.raises(ValueError, match=f"unpack_codes: bits must be 2, 3 or 4, got {bits}"):
      packed.unpack_codes(codes, bits, 6)
  with pytest.raises(TypeError, match="pack_codes: codes must be uint8, got int32"):
    packed.pack_codes(codes.astype(np.int32), 4)
  with pytest.raises(ValueError, match=r"unpack_codes: packed must be .* got a scalar"):
    packed.unpack_codes(np.uint8(1), 4, 1)
  with pytest.raises(ValueError, match="13 codes of 3 bits take 5 bytes, got 6"):
    packed.unpack_codes(codes, 3, 13)
