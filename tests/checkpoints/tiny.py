"""Small checkpoints for tests: written by hand, read as one parameter, compared byte by byte."""

import jax
import ml_dtypes
import numpy as np
import pytest

from moejax.checkpoints import files, load_params
from moejax.models import tensors as t

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu


def normal(*shape, seed=0, dtype=BF16):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def write(directory, tensors, max_shard_bytes=10**9):
  """float8 types keep their names in the file, as other writers have them."""
  files.write_checkpoint(directory, tensors.items(), max_shard_bytes)


def load_one(directory, tensor, dtype="bfloat16"):
  """The parameter of a checkpoint that holds no other."""
  node = load_params(directory, [tensor], dtype)["params"]
  for key in tensor.path:
    node = node[key]
  assert isinstance(node, jax.Array) and node.shape == tensor.shape
  return node


def assert_equal(found, expected):
  assert found.dtype == expected.dtype and found.shape == expected.shape
  assert np.asarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()


NUM, WIDTH, INNER = 5, 3, 7


def expert_tensors():
  names = lambda e, part: (f"old.{e}.{part}", f"experts.{e}.{part}.weight")
  return t.experts(("moe",), NUM, WIDTH, INNER, names, (("gate_up_proj",), ("down_proj",)))


def expert_files(stem="experts.{}.{}.weight", dtype=BF16):
  shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
  return {
    stem.format(e, part): normal(*shape, seed=10 * e + i, dtype=dtype)
    for e in range(NUM)
    for i, (part, shape) in enumerate(shapes.items())
  }


def stack(parts):
  """The two parameters, said once more: gate columns first, then up."""
  expert = lambda e, part: parts[f"experts.{e}.{part}.weight"].T
  gate_up = [np.hstack([expert(e, "gate"), expert(e, "up")]) for e in range(NUM)]
  return np.stack(gate_up), np.stack([expert(e, "down") for e in range(NUM)])


PIECE = t.matrix(("a", "b"), (4, 3), "x.weight", "y.weight")


def refused(directory, tensors, stored, message):
  write(directory, stored)
  with pytest.raises(ValueError, match=message):
    load_params(directory, tensors)
