"""FP8 and FP4 checkpoints: all codes, exact where BF16 holds the value, and scales that fit."""

import numpy as np
import pytest

from moejax.checkpoints import load_params
from moejax.models import tensors as t
from tests.checkpoints.tiny import (
  assert_equal,
  BF16,
  E8M0,
  FP8,
  load_one,
  normal,
  PIECE,
  refused,
  write,
)
from tests.oracles import assert_same_bits, to_bf16


def block_scales(scales, shape, block):
  """float32 scale of every element."""
  rows, columns = (np.arange(n) // b for n, b in zip(shape, block))
  return scales.astype(np.float32)[rows[:, None], columns[None, :]]


def all_codes(dtype, shape):
  count = int(np.prod(shape))
  return np.resize(np.arange(256, dtype=np.uint8), count).reshape(shape).view(dtype)


@pytest.mark.parametrize("shape", [(128, 256), (130, 257), (1, 300), (300, 5)])
@pytest.mark.parametrize("kind", ["e8m0", "float32"])
@pytest.mark.parametrize("name", ["x.scale", "x.weight_scale_inv"])
def test_fp8_with_block_scales(tmp_path, shape, kind, name):
  codes = all_codes(FP8, shape)
  blocks = tuple(-(-n // 128) for n in shape)
  scales = 2.0 ** np.random.default_rng(0).integers(-100, 100, blocks)
  scales = scales.astype(E8M0) if kind == "e8m0" else (scales * 1.1).astype(np.float32)
  write(tmp_path, {"x.weight": codes, name: scales})
  expected = codes.astype(np.float32) * block_scales(scales, shape, (128, 128))
  if kind == "e8m0":
    assert_same_bits(expected, to_bf16(expected))  # exact in BF16
  tensor = t.matrix(("x",), shape[::-1], "x.weight")
  assert_same_bits(np.asarray(load_one(tmp_path, tensor)).astype(np.float32).T, to_bf16(expected))
  assert_same_bits(np.asarray(load_one(tmp_path, tensor, "float32")).T, expected)


@pytest.mark.parametrize("stored", [np.int8, np.uint8])
@pytest.mark.parametrize("scale", [0, 1, 100, 127, 200, 252])
def test_packed_fp4(tmp_path, stored, scale):
  packed = all_codes(stored, (131, 64))
  scales = np.full((131, 4), scale, np.uint8)
  scales[1, 2], scales[130, 3], scales[:, 1] = 130, 129, 127
  write(tmp_path, {"x.weight": packed, "x.scale": scales.view(E8M0)})
  # One nibble after the other, low first; code 8 is +0.
  values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
  table = np.array(values, np.float32)
  packed = packed.view(np.uint8)
  codes = np.empty((131, 128), np.uint8)
  codes[:, ::2], codes[:, 1::2] = packed & 15, packed >> 4
  expected = table[codes] * block_scales(scales.view(E8M0), codes.shape, (1, 32))
  assert_same_bits(expected, to_bf16(expected))  # exact in BF16
  tensor = t.matrix(("x",), (128, 131), "x.weight")
  assert_same_bits(np.asarray(load_one(tmp_path, tensor)).astype(np.float32).T, expected)


def test_quantised_experts_are_stacked(tmp_path):
  names = lambda e, part: (f"experts.{e}.{part}.weight",)
  tensors = t.experts(("moe",), 3, 64, 32, names, ((), ()))
  stored, expected = {}, {}
  for e in range(3):
    for i, part in enumerate(("gate", "up", "down")):
      shape = (64, 32) if part == "down" else (32, 64)
      packed = np.random.default_rng(3 * e + i).integers(
        0, 256, (shape[0], shape[1] // 2), np.uint8
      )
      stored[f"experts.{e}.{part}.weight"] = packed.view(np.int8)
      scales = np.full((shape[0], shape[1] // 32), 120 + e, np.uint8).view(E8M0)
      stored[f"experts.{e}.{part}.scale"] = scales
      one = tmp_path / f"{e}{part}"
      write(one, {"x.weight": packed, "x.scale": scales})
      expected[e, part] = np.asarray(load_one(one, t.matrix(("x",), shape[::-1], "x.weight")))
  write(tmp_path, stored, 1000)
  moe = load_params(tmp_path, tensors)["params"]["moe"]
  for e in range(3):
    gate_up = np.hstack([expected[e, "gate"], expected[e, "up"]])
    assert_equal(moe["gate_up"][e], gate_up)
    assert_equal(moe["down"][e], expected[e, "down"])


def test_quantised_fused_and_split(tmp_path):
  """Blocks go over the seams of parts, not of the parameter."""
  codes = all_codes(FP8, (2, 260, 130))
  scales = normal(2, 3, 2, dtype=np.float32)
  write(tmp_path / "fused", {"experts": codes, "experts_scale_inv": scales})
  tensor = t.Tensor(("x",), (2, 130, 260), ((("0",),), (("1",),)), True, True, fused=("experts",))
  factors = [block_scales(scales[e], (260, 130), (128, 128)) for e in (0, 1)]
  every = [codes[e].astype(np.float32) * factors[e] for e in (0, 1)]
  found = load_one(tmp_path / "fused", tensor, "float32")
  assert_same_bits(found, np.stack([x.T for x in every]))
  write(tmp_path / "split", {"w.weight": codes[0], "w.weight_scale_inv": scales[0]})
  tensor = t.Tensor(("x",), (2, 130, 130), ((("w.weight",),),), transposed=True, split=2)
  found = load_one(tmp_path / "split", tensor, "float32")
  assert_same_bits(found, np.stack([every[0][:130].T, every[0][130:].T]))


def test_missing_scale(tmp_path):
  message = r"tensor x.weight: F8_E4M3 needs a scale, .* no tensor x.scale or x.weight_scale_inv\."
  refused(tmp_path, [PIECE], {"x.weight": np.zeros((3, 4), FP8)}, message)


@pytest.mark.parametrize(
  "codes,scale,message",
  [
    (
      (FP8, (3, 4)),
      (np.float32, (1, 2)),
      r"x.scale: found F32 of shape \(1, 2\), .*shape \(1, 1\)",
    ),
    ((FP8, (3, 4)), (BF16, (1, 1)), r"x.scale: found BF16 .* expected F8_E8M0 or F32 of shape"),
    ((np.int8, (3, 2)), (E8M0, (3, 1)), r"tensor x.weight: I8 is not expected of shape \(3, 4\)"),
  ],
)
def test_wrong_scale(tmp_path, codes, scale, message):
  stored = {"x.weight": np.zeros(codes[1], codes[0]), "x.scale": np.ones(scale[1], scale[0])}
  refused(tmp_path, [PIECE], stored, message)


@pytest.mark.parametrize("dtype,shape", [(np.float32, (8, 4)), (E8M0, (8, 2)), (E8M0, (1, 1))])
def test_wrong_scale_of_fp4(tmp_path, dtype, shape):
  tensor = t.matrix(("x",), (128, 8), "x.weight")
  stored = {"x.weight": np.zeros((8, 64), np.int8), "x.scale": np.ones(shape, dtype)}
  refused(tmp_path, [tensor], stored, r"x.scale: found .* expected F8_E8M0 of shape \(8, 4\)\.")


def test_a_quantised_vector_is_refused(tmp_path):
  tensor = t.vector(("x",), (32,), "x.weight")
  stored = {"x.weight": np.zeros(32, FP8), "x.scale": np.ones(1, np.float32)}
  refused(tmp_path, [tensor], stored, r"tensor x.weight: F8_E4M3 is not expected of shape \(32,\)")
