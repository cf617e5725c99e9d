"""Parameters from files: every layout and dtype, bit for bit, and nothing left over."""

import os
import tracemalloc

import jax
import numpy as np
import pytest

from moejax.checkpoints import files, load_params
from moejax.models import tensors as t
from tests.checkpoints.tiny import (
  assert_equal,
  BF16,
  E8M0,
  expert_files,
  expert_tensors,
  FP8,
  INNER,
  load_one,
  normal,
  NUM,
  PIECE,
  refused,
  stack,
  WIDTH,
  write,
)
from tests.oracles import assert_same_bits, to_bf16

# Layouts.


@pytest.mark.parametrize("out,inner", [(3, 5), (63, 2), (64, 7), (65, 130), (130, 1)])
def test_a_matrix_is_transposed(tmp_path, out, inner):
  w = normal(out, inner)
  write(tmp_path, {"w": w})
  assert_equal(load_one(tmp_path, t.matrix(("a", "b"), (inner, out), "w")), w.T)


def test_a_vector_is_not(tmp_path):
  w = normal(5, 3)
  write(tmp_path, {"w": w})
  assert_equal(load_one(tmp_path, t.vector(("embed",), (5, 3), "w")), w)


def test_gate_and_up_are_concatenated_along_out(tmp_path):
  gate, up, down = normal(7, 3, seed=1), normal(7, 3, seed=2), normal(3, 7, seed=3)
  write(tmp_path, {"gate": gate, "up": up, "down": down})
  mlp = load_params(tmp_path, t.gated(("mlp",), 3, 7, ("gate",), ("up",), ("down",)))
  assert_equal(mlp["params"]["mlp"]["gate_up"], np.concatenate([gate.T, up.T], axis=1))
  assert_equal(mlp["params"]["mlp"]["down"], down.T)


def test_vectors_are_concatenated_and_stacked(tmp_path):
  tensor = t.Tensor(("bias",), (2, 6), ((("a",), ("b",)), (("c",), ("d",))), stacked=True)
  parts = {name: normal(3, seed=ord(name)) for name in "abcd"}
  write(tmp_path, parts)
  expected = np.concatenate(list(parts.values())).reshape(2, 6)
  assert_equal(load_one(tmp_path, tensor), expected)


def assert_experts(directory, parts):
  found = load_params(directory, expert_tensors())["params"]["moe"]
  gate_up, down = stack(parts)
  assert_equal(found["gate_up"], gate_up)
  assert_equal(found["down"], down)


@pytest.mark.parametrize("shard_bytes", [1, 100, 10**9])
def test_experts_one_by_one_wherever_they_stand(tmp_path, shard_bytes):
  parts = expert_files()
  scattered = {name: parts[name] for name in sorted(parts, key=lambda name: name[::-1])}
  write(tmp_path, scattered, shard_bytes)
  assert (files.INDEX in os.listdir(tmp_path)) == (shard_bytes < 10**9)
  assert_experts(tmp_path, parts)


def test_experts_fused(tmp_path):
  parts = expert_files()
  gate_up, down = stack(parts)
  transposed = lambda x: np.ascontiguousarray(x.swapaxes(1, 2))
  write(tmp_path, {"gate_up_proj": transposed(gate_up), "down_proj": transposed(down)})
  assert_experts(tmp_path, parts)


def test_alternative_names(tmp_path):
  parts = expert_files()
  old = expert_files("old.{}.{}")
  # Each piece has its own name, even within a layer.
  mixed = {a if i % 2 else b: parts[a] for i, (a, b) in enumerate(zip(parts, old))}
  write(tmp_path, mixed)
  assert_experts(tmp_path, parts)


def test_split_cuts_rows_into_groups(tmp_path):
  tensor = t.Tensor(("wo_a",), (4, 3, 5), ((("w",),),), transposed=True, split=4)
  w = normal(20, 3)
  write(tmp_path, {"w": w})
  found = load_one(tmp_path, tensor)
  for group in range(4):
    assert_equal(found[group], w[5 * group : 5 * group + 5].T)


# Dtypes.


AWKWARD = np.array(
  [1.00390625, 1.01171875, -1.00390626, 0.0, -0.0, 3.4e38, np.inf, -np.inf, np.nan, 1e-40, 2**-133],
  np.float32,
)


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kept", ["weight", "float32"])
def test_casts(tmp_path, stored, dtype, kept):
  with np.errstate(over="ignore"):
    values = AWKWARD.astype(stored)
  write(tmp_path, {"x": values})
  found = load_one(tmp_path, t.vector(("x",), values.shape, "x", dtype=kept), dtype)
  wide = values.astype(np.float32)
  narrow = dtype == "bfloat16" and kept == "weight"
  assert found.dtype == (BF16 if narrow else np.float32)
  assert_same_bits(np.asarray(found).astype(np.float32), to_bf16(wide) if narrow else wide)


@pytest.mark.parametrize("stored", [BF16, np.float32])
def test_bits_of_the_same_dtype_are_untouched(tmp_path, stored):
  """NaN payloads and subnormals too."""
  bits = np.random.default_rng(0).integers(0, 256, 1 << 15, np.uint8)
  x = np.concatenate([bits, [0x01, 0x00, 0x81, 0x7F] * 2]).astype(np.uint8).view(stored)
  write(tmp_path, {"x": x})
  tensor = t.vector(("x",), x.shape, "x")
  assert_equal(load_one(tmp_path, tensor, "float32" if stored == np.float32 else "bfloat16"), x)


@pytest.mark.parametrize("stored", [np.int64, np.int32])
def test_tables_are_int32(tmp_path, stored):
  table = np.array([[0, 1, -1], [2**31 - 1, -(2**31), 5]], stored)
  write(tmp_path, {"x": table})
  found = load_one(tmp_path, t.vector(("x",), (2, 3), "x", dtype="int32"), "float32")
  assert_equal(found, table.astype(np.int32))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_tables_out_of_range(tmp_path, value):
  write(tmp_path, {"x": np.array([1, value])})
  with pytest.raises(ValueError, match=rf"tensor x: {value} is out of the range of int32"):
    load_one(tmp_path, t.vector(("x",), (2,), "x", dtype="int32"))


# What does not fit.


def test_missing_tensor(tmp_path):
  message = r"parameter a/b: the checkpoint has no tensor x.weight or y.weight\."
  refused(tmp_path, [PIECE], {"z": normal(1)}, message)


def test_missing_expert(tmp_path):
  parts = expert_files()
  del parts["experts.3.up.weight"]
  message = r"moe/gate_up: .* no tensor old.3.up or experts.3.up.weight or gate_up_proj\."
  refused(tmp_path, expert_tensors(), parts, message)


@pytest.mark.parametrize("shape", [(4, 3), (3, 5), (12,), (1, 3, 4)])
def test_wrong_shape(tmp_path, shape):
  message = rf"tensor y.weight: found BF16 of shape {str(shape)[:-1]}\), expected \(3, 4\)\."
  refused(tmp_path, [PIECE], {"y.weight": normal(*shape)}, message.replace(" (", r" \("))


def test_wrong_shape_of_fused_and_split(tmp_path):
  parts = {"gate_up_proj": normal(NUM, WIDTH, 2 * INNER), "down_proj": normal(NUM, WIDTH, INNER)}
  message = r"tensor gate_up_proj: found BF16 of shape \(5, 3, 14\), expected \(5, 14, 3\)\."
  refused(tmp_path / "fused", expert_tensors(), parts, message)
  tensor = t.Tensor(("wo_a",), (4, 3, 5), ((("w",),),), transposed=True, split=4)
  message = r"tensor w: found BF16 of shape \(4, 5, 3\), expected \(20, 3\)\."
  refused(tmp_path / "split", [tensor], {"w": normal(4, 5, 3)}, message)


@pytest.mark.parametrize(
  "tensor,stored,message",
  [
    (PIECE, np.zeros((3, 4), np.int64), r"dtype I64 is not expected, but one of BF16, F16, F32"),
    (PIECE, np.zeros((3, 4), E8M0), r"dtype F8_E8M0 is not expected"),
    (t.vector(("t",), (2,), "x.weight", dtype="int32"), normal(2), r"BF16 .* one of I32, I64"),
  ],
)
def test_wrong_dtype(tmp_path, tensor, stored, message):
  refused(tmp_path, [tensor], {"x.weight": stored}, message)


def test_leftovers_are_named(tmp_path):
  stored = {"x.weight": normal(3, 4)} | {f"extra.{i}": normal(1) for i in range(5)}
  message = r"tensors of no parameter here: extra.0, extra.1, extra.2 and 2 more\."
  refused(tmp_path / "many", [PIECE], stored, message)
  stored = {"x.weight": normal(3, 4), "x.scale": normal(1)}  # of a matrix that needs none
  refused(tmp_path / "scale", [PIECE], stored, r"tensors of no parameter here: x.scale\.")
  stored = {"x.weight": normal(3, 4), "y.weight": normal(3, 4)}
  refused(tmp_path / "both", [PIECE], stored, r"tensors of no parameter here: y.weight\.")
  for name in ("attention.inv_freq", "rotary_emb.inv_freq.weight", "layers.0.mtp.weight"):
    stored = {"x.weight": normal(3, 4), name: normal(1)}
    refused(tmp_path / name, [PIECE], stored, rf"tensors of no parameter here: {name}\.")


def test_computed_tables_and_mtp_are_ignored(tmp_path):
  names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]
  names += ["mtp.0.e_proj.weight", "mtp.0.ffn.experts.0.w1.scale", "model.mtp.0.norm.weight"]
  write(tmp_path, {"x.weight": normal(3, 4)} | {name: normal(2) for name in names})
  assert load_one(tmp_path, PIECE).shape == (4, 3)


def test_optional_parameters_are_zero_where_they_lack(tmp_path):
  tensor = t.vector(("bias",), (3,), "bias", dtype="float32", optional=True)
  write(tmp_path / "without", {"x.weight": normal(3, 4)})
  assert_equal(
    load_params(tmp_path / "without", [PIECE, tensor])["params"]["bias"], np.zeros(3, np.float32)
  )
  write(tmp_path / "with", {"bias": normal(3)})
  assert_equal(load_one(tmp_path / "with", tensor), normal(3).astype(np.float32))


def test_half_of_an_optional_parameter_is_missing(tmp_path):
  tensor = t.Tensor(("bias",), (6,), ((("a",), ("b",)),), optional=True)
  refused(tmp_path, [tensor], {"a": normal(3)}, r"parameter bias: .* no tensor b\.")


def test_a_list_that_does_not_make_up_its_parameter(tmp_path):
  tensor = t.Tensor(("x",), (3, 4), ((("a",),), (("b",),)), stacked=True)
  message = r"parameter x: its pieces do not make up shape \(3, 4\)"
  refused(tmp_path, [tensor], {"a": normal(4), "b": normal(4)}, message)


def test_unknown_dtype(tmp_path):
  write(tmp_path, {"x.weight": normal(3, 4)})
  with pytest.raises(ValueError, match=r"must be bfloat16 or float32, got 'float16'"):
    load_params(tmp_path, [PIECE], "float16")


def test_everything_is_checked_before_anything_is_read(tmp_path, monkeypatch):
  write(tmp_path, {"x.weight": normal(3, 4), "bias": normal(4)})
  monkeypatch.setattr(files.Entry, "read", lambda self: pytest.fail("read"))
  with pytest.raises(ValueError, match=r"tensor bias: found BF16 of shape"):
    load_params(tmp_path, [PIECE, t.vector(("bias",), (3,), "bias")])


# Memory.


@pytest.mark.parametrize("quantised", [False, True])
def test_one_parameter_and_a_little_are_in_memory_at_a_time(tmp_path, monkeypatch, quantised):
  """Beside what jax was handed: tracemalloc sees NumPy's arrays and not the mapped files."""
  count, side = 12, 512
  tensors = [t.matrix((f"p{i}",), (side, side), f"p{i}.weight") for i in range(count)]
  kind = FP8 if quantised else np.float32
  stored = {f"p{i}.weight": np.ones((side, side), kind) for i in range(count)}
  if quantised:
    stored |= {f"p{i}.scale": np.ones((4, 4), np.float32) for i in range(count)}
  write(tmp_path, stored, 4 * side * side)
  del stored

  def device_put(array):
    assert array.ctypes.data % 64 == 0  # or jax would copy it
    return np.zeros(0)

  monkeypatch.setattr(jax, "device_put", device_put)
  tracemalloc.start()
  try:
    load_params(tmp_path, tensors)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  parameter = 2 * side * side
  # FP8 has the dequantised tensor too, and the decoder's temporaries for one band of it.
  assert parameter < peak < (8 if quantised else 1.5) * parameter
