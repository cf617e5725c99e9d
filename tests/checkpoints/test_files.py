"""Safetensors files: exact bits of every dtype, whole or not there, one sentence when damaged."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moejax.checkpoints import files


def named(**shapes):
  rng = np.random.default_rng(0)
  return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(directory, tensors, max_shard_bytes=10**9):
  files.write_checkpoint(directory, tensors.items(), max_shard_bytes)


def read(directory):
  return {name: entry.read() for name, entry in files.open_checkpoint(directory).items()}


def raw_file(path, header, data=b""):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def assert_equal(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == array.dtype and found[name].shape == array.shape
    assert found[name].tobytes() == array.tobytes(), name


CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
  "tag,stored,dtype",
  [
    ("BF16", np.arange(2**16, dtype=np.uint16), ml_dtypes.bfloat16),
    ("F16", np.arange(2**16, dtype=np.uint16), np.float16),
    ("F32", np.arange(2**32, step=65521, dtype=np.uint32), np.float32),
    ("F8_E4M3", CODES, np.uint8),
    ("F8_E8M0", CODES, np.uint8),
    ("I8", CODES, np.int8),
    ("U8", CODES, np.uint8),
    ("I32", np.array([-(2**31), 2**31 - 1], np.int32), np.int32),
    ("I64", np.array([-(2**63), 2**63 - 1], np.int64), np.int64),
  ],
)
@pytest.mark.parametrize("odd", [0, 1])
def test_every_dtype_comes_with_its_bits(tmp_path, tag, stored, dtype, odd):
  data = stored.tobytes()
  header = {
    "first": {"dtype": "U8", "shape": [odd], "data_offsets": [0, odd]},
    "x": {"dtype": tag, "shape": [2, stored.size // 2], "data_offsets": [odd, odd + len(data)]},
  }
  # A tensor may stand at any byte.
  raw_file(tmp_path / files.SINGLE, header, b"\0" * odd + data[: stored.nbytes])
  x = read(tmp_path)["x"]
  assert x.dtype == dtype and x.shape == (2, stored.size // 2)
  assert x.tobytes() == data
  assert not x.flags.writeable and not x.flags.owndata


def test_files_of_the_library_are_read(tmp_path):
  tensors = named(a=(5, 3), none=(0, 3), one=()) | {
    "bf16": named(x=(3,))["x"].astype(ml_dtypes.bfloat16),
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    "e8m0": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu),
  }
  safetensors.numpy.save_file(tensors, tmp_path / files.SINGLE, metadata={"format": "pt"})
  assert_equal(read(tmp_path), tensors | {"fp8": CODES, "e8m0": CODES})


def test_what_is_written_is_read_by_the_library(tmp_path):
  tensors = named(a=(3, 2), b=(5,)) | {"c": np.array([1, 2.5], ml_dtypes.bfloat16)}
  write(tmp_path, tensors)
  assert_equal(safetensors.numpy.load_file(tmp_path / files.SINGLE), tensors)
  with safetensors.safe_open(tmp_path / files.SINGLE, "np") as file:
    assert file.metadata() == {"format": "pt"}
  assert os.stat(tmp_path / files.SINGLE).st_mode & 0o777 == 0o644


def test_shards_and_their_index(tmp_path):
  tensors = named(large=(100,), e=(4,), d=(4,), c=(4,), b=(4,), a=(4,))
  write(tmp_path, tensors, max_shard_bytes=40)
  index = json.loads((tmp_path / files.INDEX).read_text())
  assert index["metadata"] == {"total_size": 4 * 120}
  shards = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
  assert index["weight_map"] == dict(zip(tensors, [shards[i] for i in (0, 1, 1, 2, 2, 3)]))
  assert sorted(os.listdir(tmp_path)) == sorted([*shards, files.INDEX])
  assert_equal(read(tmp_path), tensors)


@pytest.mark.parametrize("before", [40, 80, 10**9])
@pytest.mark.parametrize("after", [40, 80, 10**9])
def test_a_new_checkpoint_replaces_the_old(tmp_path, before, after):
  write(tmp_path, named(a=(4,), b=(4,), c=(4,), d=(20,)), max_shard_bytes=before)
  new = named(d=(4,), e=(4,), f=(6,), g=(20,))
  write(tmp_path, new, max_shard_bytes=after)
  assert_equal(read(tmp_path), new)
  used = {entry.path.name for entry in files.open_checkpoint(tmp_path).values()}
  assert set(os.listdir(tmp_path)) - {files.INDEX} == used
  assert (files.INDEX in os.listdir(tmp_path)) == (len(used) > 1)


@pytest.mark.parametrize("shard_bytes", [20, 10**9])
def test_a_failure_while_writing_leaves_the_old_checkpoint(tmp_path, shard_bytes):
  old = named(a=(4,), b=(4,), c=(4,))
  write(tmp_path, old, shard_bytes)
  there = sorted(os.listdir(tmp_path))

  def failing():
    yield from named(a=(4,), b=(4,)).items()
    raise RuntimeError("killed")

  with pytest.raises(RuntimeError, match=r"killed"):
    files.write_checkpoint(tmp_path, failing(), 20)
  assert sorted(os.listdir(tmp_path)) == there
  assert_equal(read(tmp_path), old)


def test_a_failure_between_renames_is_no_mixture(tmp_path, monkeypatch):
  write(tmp_path, named(a=(4,), b=(4,)), 20)
  renames = []

  def replace(source, target, real=os.replace):
    if renames:
      raise RuntimeError("killed")
    renames.append(target)
    real(source, target)

  monkeypatch.setattr(os, "replace", replace)
  with pytest.raises(RuntimeError, match=r"killed"):
    write(tmp_path, named(b=(4,), a=(4,)), 20)
  with pytest.raises(FileNotFoundError, match=r"no checkpoint in"):
    files.open_checkpoint(tmp_path)


def test_headers_are_read_and_tensors_are_not(tmp_path, monkeypatch):
  write(tmp_path, named(a=(4,), b=(4,)), 20)
  mapped = []
  real = np.memmap
  monkeypatch.setattr(
    np, "memmap", lambda path, *rest: mapped.append(path.name) or real(path, *rest)
  )
  checkpoint = files.open_checkpoint(tmp_path)
  assert checkpoint["b"].shape == (4,) and checkpoint["b"].dtype == "F32" and not mapped
  checkpoint["b"].read()
  assert mapped == ["model-00002-of-00002.safetensors"]


def test_no_checkpoint(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*: expected model.safe"):
    files.open_checkpoint(tmp_path)


def test_missing_shard(tmp_path):
  write(tmp_path, named(a=(4,), b=(4,)), 20)
  (tmp_path / "model-00002-of-00002.safetensors").unlink()
  message = r"shard model-00002-of-00002.safetensors, which .* names, is missing"
  with pytest.raises(FileNotFoundError, match=message):
    files.open_checkpoint(tmp_path)


def test_index_that_names_a_tensor_its_shard_lacks(tmp_path):
  write(tmp_path, named(a=(4,), b=(4,)), 20)
  index = json.loads((tmp_path / files.INDEX).read_text())
  index["weight_map"]["b"] = index["weight_map"]["a"]
  (tmp_path / files.INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError, match=r"tensor b is not in model-00001-of-00002.safetensors"):
    files.open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": '])
def test_damaged_index(tmp_path, text):
  (tmp_path / files.INDEX).write_text(text)
  with pytest.raises(ValueError, match=r"expected JSON with a weight_map"):
    files.open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_file(tmp_path, keep):
  write(tmp_path, named(a=(4, 3)))
  path = tmp_path / files.SINGLE
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"model.safetensors: truncated or"):
    files.open_checkpoint(tmp_path)


def test_bytes_behind_the_end(tmp_path):
  write(tmp_path, named(a=(4, 3)))
  path = tmp_path / files.SINGLE
  path.write_bytes(path.read_bytes() + b"\0")
  with pytest.raises(ValueError, match=r"truncated or damaged, its tensors end at"):
    files.open_checkpoint(tmp_path)


FIELD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
  "header",
  [
    b"{",
    b"[1]",
    b"\xff\xfe",
    {"a": 3},
    {"a": {"dtype": "F32", "shape": [2]}},
    {"a": {**FIELD, "shape": [3]}},
    {"a": {**FIELD, "dtype": "BF16"}},
    {"a": {**FIELD, "data_offsets": [-8, 0]}},
    {"a": {**FIELD, "data_offsets": [0, 8, 9]}},
  ],
)
def test_damaged_header(tmp_path, header):
  raw_file(tmp_path / files.SINGLE, header, bytes(8))
  with pytest.raises(ValueError, match=r"the safetensors header is damaged"):
    files.open_checkpoint(tmp_path)


def test_other_dtypes_are_refused_when_read(tmp_path):
  raw_file(tmp_path / files.SINGLE, {"a": {**FIELD, "dtype": "F4", "shape": [16]}}, bytes(8))
  entry = files.open_checkpoint(tmp_path)["a"]
  with pytest.raises(ValueError, match=r"tensor a: dtype F4 is none of BF16, F16"):
    entry.read()
