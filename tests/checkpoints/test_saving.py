"""Parameters to files and back: the same bits, and the old checkpoint until the new is whole."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from moejax.checkpoints import files, load_params, save_params, weights
from moejax.models import tensors as t
from tests.checkpoints.tiny import (
  assert_equal,
  BF16,
  expert_files,
  expert_tensors,
  load_one,
  normal,
  NUM,
  PIECE,
  write,
)


def everything():
  """A list of tensors of every layout, and a checkpoint of them under first names."""
  tensors = [
    t.vector(("embed",), (11, 3), "embed.weight", "other.weight"),
    t.matrix(("head",), (3, 11), "head.weight"),
    t.vector(("router_bias",), (NUM,), "bias", dtype="float32", optional=True),
    t.vector(("table",), (11, 2), "tid2eid", dtype="int32"),
    t.Tensor(("wo_a",), (4, 3, 5), ((("wo_a",),),), transposed=True, split=4),
    *expert_tensors(),
  ]
  stored = {
    "embed.weight": normal(11, 3),
    "head.weight": normal(11, 3, seed=1),
    "bias": normal(NUM, dtype=np.float32),
    "tid2eid": np.arange(22).reshape(11, 2),
    "wo_a": normal(20, 3),
    **expert_files("old.{}.{}"),
  }
  return tensors, stored


@pytest.mark.parametrize("shard_bytes", [100, 10**9])
def test_round_trip(tmp_path, shard_bytes):
  tensors, stored = everything()
  write(tmp_path / "a", stored)
  params = load_params(tmp_path / "a", tensors)
  config = {"model_type": "x", "torch_dtype": "float32", "a": None}
  save_params(tmp_path / "b", params, tensors, config, max_shard_bytes=shard_bytes)
  written = {name: entry.read() for name, entry in files.open_checkpoint(tmp_path / "b").items()}
  assert written.keys() == stored.keys()
  for name, array in stored.items():
    assert_equal(written[name], array)
  again = load_params(tmp_path / "b", tensors)
  jax.tree.map(assert_equal, again, params)
  config_text = (tmp_path / "b" / "config.json").read_text()
  fields = {"a": None, "model_type": "x", "torch_dtype": "bfloat16"}
  assert config_text == json.dumps(fields, indent=2) + "\n"


def test_round_trip_in_float32(tmp_path):
  tensors, stored = everything()
  wide = {
    name: array if array.dtype == np.int64 else normal(*array.shape, dtype=np.float32)
    for name, array in stored.items()
  }
  write(tmp_path / "a", wide)
  params = load_params(tmp_path / "a", tensors, "float32")
  save_params(tmp_path / "b", params, tensors, {}, "float32")
  found = safetensors.numpy.load_file(tmp_path / "b" / files.SINGLE)
  assert found.keys() == wide.keys()
  for name, array in wide.items():
    assert_equal(found[name], array)
  assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"torch_dtype": "float32"}


def test_saving_does_not_round(tmp_path):
  tensor = t.vector(("x",), (2,), "x")
  params = {"params": {"x": jnp.array([1.0, 1.001], jnp.float32)}}
  with pytest.raises(ValueError, match=r"parameter x has float32 values that BF16 does not hold"):
    save_params(tmp_path, params, [tensor], {})
  assert not os.listdir(tmp_path)
  save_params(tmp_path, {"params": {"x": jnp.array([1.0, 1.5], jnp.float32)}}, [tensor], {})
  assert_equal(load_one(tmp_path, tensor), np.array([1, 1.5], BF16))
  save_params(tmp_path, {"params": {"x": jnp.array([1.0, 1.5], BF16)}}, [tensor], {}, "float32")
  assert_equal(load_one(tmp_path, tensor, "float32"), np.array([1, 1.5], np.float32))


@pytest.mark.parametrize(
  "tree,message",
  [
    ({}, r"parameter a/b is missing"),
    ({"a": {"b": normal(4, 3), "c": normal(1)}}, r"parameter a/c is not one of this model"),
    ({"a": {"b": normal(3, 4)}}, r"a/b: found shape \(3, 4\), expected \(4, 3\)"),
  ],
)
def test_parameters_that_are_not_the_model_s(tmp_path, tree, message):
  with pytest.raises(ValueError, match=message):
    save_params(tmp_path / "new", {"params": tree}, [PIECE], {})
  assert not (tmp_path / "new").exists()


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
  tensors, stored = everything()
  write(tmp_path / "a", stored)
  params = load_params(tmp_path / "a", tensors)
  save_params(tmp_path / "b", params, tensors, {"version": 1})
  before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
  real, calls = weights._copy, []

  def copy(target, values):
    calls.append(target)
    if len(calls) > 9:
      raise RuntimeError("killed")
    real(target, values)

  monkeypatch.setattr(weights, "_copy", copy)
  other = jax.tree.map(jnp.zeros_like, params)
  with pytest.raises(RuntimeError, match=r"killed"):
    save_params(tmp_path / "b", other, tensors, {"version": 2}, max_shard_bytes=50)
  assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before
