"""Parameters from the tensors of a checkpoint and back, as a family's list of `Tensor` says."""

from collections.abc import Iterator
import dataclasses
import json
import math
import os
import pathlib
import re
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moejax.checkpoints import files
from moejax.checkpoints.quantized import dequantize, QUANTIZED, scale_of, stored_shape
from moejax.checkpoints.tokenizer import Tokenizer
from moejax.models.tensors import Names, Tensor
from moejax.report.files import atomic_path

WEIGHT_DTYPES = {
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
  "float32": np.dtype(np.float32),
}

# What no forward pass here reads: tables that are computed, and multi-token prediction.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(model\.)?mtp\..*")

_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("I32", "I64")

# Rows copied at a time: a matrix that is transposed whole leaves the cache with every row.
_BAND = 128

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class _Piece:
  """One tensor of a file, as a part of a parameter.

  Attributes:
    names: alternatives.
    index: the part, in the parameter with the axes of files.
    shape: in the file.
  """

  names: Names
  index: tuple
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Source:
  """A piece that was found."""

  index: tuple
  entry: files.Entry
  scale: files.Entry | None


def load_params(
  directory: str | os.PathLike,
  tensors: list[Tensor],
  dtype: str = "bfloat16",
  unread: Names = (),
) -> dict[str, Any]:
  """Reads the parameters of a checkpoint.

  Names, shapes and dtypes of the whole checkpoint are checked before any tensor is read. Beside the
  parameters, one parameter and one tensor of a file are in memory at a time.

  Args:
    directory: with `model.safetensors` or `model.safetensors.index.json`.
    tensors: the parameters; pieces that are concatenated are of one size.
    dtype: "bfloat16" or "float32", of the parameters whose own dtype is "weight". Float32 becomes
      BF16 by rounding to nearest, ties to even; FP8 and FP4 are dequantised in float32 first.
    unread: tensors that the checkpoint may have and the model does not read (a tied head).

  Returns:
    {"params": nested dict of jax.Array} along each Tensor's path.

  Raises:
    FileNotFoundError: no checkpoint, or a missing shard.
    ValueError: a damaged file; a tensor that is missing, unexpected, or of another shape or dtype
      than expected; integers out of the range of int32.
  """
  checkpoint = files.open_checkpoint(directory)
  weight_dtype = _weight_dtype(dtype)
  sources = [_find(tensor, checkpoint) for tensor in tensors]
  _refuse_leftovers(directory, checkpoint.keys() - set(unread), sources)
  params: dict[str, Any] = {}
  for tensor, found in zip(tensors, sources):
    *parents, last = tensor.path
    node = params
    for key in parents:
      node = node.setdefault(key, {})
    # Waiting drops the NumPy array, if it was copied, before the next one is made.
    node[last] = jax.block_until_ready(jax.device_put(_read(tensor, found, weight_dtype)))
  return {"params": params}


def save_params(
  directory: str | os.PathLike,
  params: dict[str, Any],
  tensors: list[Tensor],
  config: dict[str, Any],
  dtype: str = "bfloat16",
  max_shard_bytes: int = 5 * 10**9,
  tokenizer: Tokenizer | None = None,
) -> None:
  """Writes a checkpoint that `load_params` and others read: the inverse, bit for bit.

  Every piece is a tensor [out, in] under the first of its names; tables of int32 become int64, as
  published. The weights are in place before config.json, which is written last.

  Args:
    directory: made if it is not there; a checkpoint in it is replaced.
    params: {"params": ...} as `load_params` returns them.
    tensors: all parameters.
    config: fields of config.json; `torch_dtype` is set here.
    dtype: "bfloat16" or "float32", of the weights in the file.
    max_shard_bytes: size of a shard.
    tokenizer: its files are written too.

  Raises:
    ValueError: parameters that are missing, unexpected or of another shape, or float32 values that
      BF16 does not hold: rounding is the caller's to say.
  """
  weight_dtype = _weight_dtype(dtype)
  leaves = _leaves(params, tensors)
  files.write_checkpoint(directory, _stored(leaves, tensors, weight_dtype), max_shard_bytes)
  if tokenizer is not None:
    tokenizer.save(directory)
  with atomic_path(pathlib.Path(directory, "config.json")) as path:
    fields = {**config, "torch_dtype": dtype}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _weight_dtype(dtype: str) -> np.dtype:
  if dtype not in WEIGHT_DTYPES:
    raise ValueError(f"dtype of weights must be bfloat16 or float32, got {dtype!r}.")
  return WEIGHT_DTYPES[dtype]


def _file_axes(tensor: Tensor, array: np.ndarray) -> np.ndarray:
  """A view of the parameter with its last axes as files have them."""
  return array.swapaxes(-1, -2) if tensor.transposed else array


def _file_shape(tensor: Tensor) -> tuple[int, ...]:
  if not tensor.transposed:
    return tensor.shape
  *lead, inner, out = tensor.shape
  return (*lead, out, inner)


def _pieces(tensor: Tensor) -> list[_Piece]:
  """The pieces of a parameter and where they go."""
  shape = _file_shape(tensor)
  if tensor.split > 1:
    parts, out, inner = shape
    return [_Piece(tensor.pieces[0][0], (), (parts * out, inner))]
  stack = shape[0] if tensor.stacked else 1
  out, *rest = shape[1:] if tensor.stacked else shape
  rows = out // len(tensor.pieces[0])
  if len(tensor.pieces) != stack or rows * len(tensor.pieces[0]) != out:
    raise ValueError(f"parameter {_path(tensor)}: its pieces do not make up shape {tensor.shape}.")
  return [
    _Piece(
      names,
      (*((e,) if tensor.stacked else ()), slice(j * rows, (j + 1) * rows)),
      (rows, *rest),
    )
    for e, concatenated in enumerate(tensor.pieces)
    for j, names in enumerate(concatenated)
  ]


def _find(tensor: Tensor, checkpoint: dict[str, files.Entry]) -> list[_Source]:
  """What to read for a parameter; nothing for an optional one that is not there."""
  fused = _Piece(tensor.fused, (), _file_shape(tensor))
  whole = any(name in checkpoint for name in tensor.fused)
  pieces = [fused] if whole else _pieces(tensor)
  present = [next((n for n in piece.names if n in checkpoint), None) for piece in pieces]
  if tensor.optional and not any(present):
    return []
  for piece, name in zip(pieces, present):
    if name is None:
      tried = " or ".join((*piece.names, *tensor.fused))
      raise ValueError(f"parameter {_path(tensor)}: the checkpoint has no tensor {tried}.")
  return [
    _checked(tensor, piece, checkpoint[name], checkpoint) for piece, name in zip(pieces, present)
  ]


def _checked(tensor: Tensor, piece: _Piece, entry: files.Entry, checkpoint) -> _Source:
  """The source of a piece; refuses a dtype, shape or scale that does not fit."""
  dtypes = _INTEGERS if tensor.dtype == "int32" else (*_FLOATS, *QUANTIZED)
  if entry.dtype not in dtypes:
    raise ValueError(
      f"tensor {entry.name}: dtype {entry.dtype} is not expected, but one of {', '.join(dtypes)}."
    )
  expected = stored_shape(piece.shape, entry.dtype)
  if entry.shape != expected:
    raise ValueError(
      f"tensor {entry.name}: found {entry.dtype} of shape {entry.shape}, expected {expected}."
    )
  return _Source(piece.index, entry, scale_of(entry, piece.shape, checkpoint))


def _refuse_leftovers(directory, checkpoint, sources: list[list[_Source]]) -> None:
  used = {s.entry.name for found in sources for s in found}
  used |= {s.scale.name for found in sources for s in found if s.scale is not None}
  left = sorted(name for name in checkpoint if name not in used and not _IGNORED.fullmatch(name))
  if left:
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    raise ValueError(f"{directory}: tensors of no parameter here: {', '.join(left[:3])}{more}.")


def _read(tensor: Tensor, sources: list[_Source], weight_dtype: np.dtype) -> np.ndarray:
  """The parameter, filled piece by piece."""
  dtype = weight_dtype if tensor.dtype == "weight" else np.dtype(tensor.dtype)
  if not sources:
    return np.zeros(tensor.shape, dtype)
  array = _aligned(tensor.shape, dtype)
  for source in sources:
    target = _file_axes(tensor, array)[source.index]
    _copy(target, _values(source, dtype).reshape(target.shape))
  return array


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An array as jax wants them on a CPU: it takes the memory over, where it would copy others."""
  size = math.prod(shape) * dtype.itemsize
  raw = np.empty(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)


def _values(source: _Source, dtype: np.dtype) -> np.ndarray:
  values = source.entry.read()
  if source.scale is not None:
    return dequantize(source.entry.dtype, values, source.scale.read(), dtype)
  if dtype == np.int32 and values.dtype == np.int64:
    bounds = np.iinfo(np.int32)
    wrong = values[(values < bounds.min) | (values > bounds.max)]
    if wrong.size:
      raise ValueError(f"tensor {source.entry.name}: {wrong[0]} is out of the range of int32.")
  return values


def _copy(target: np.ndarray, values: np.ndarray) -> None:
  """target[...] = values, cast to the target's dtype."""
  if target.ndim > 2:
    for part, part_values in zip(target, values):
      _copy(part, part_values)
    return
  for start in range(0, len(target), _BAND):
    band = slice(start, start + _BAND)
    target[band] = values[band].astype(target.dtype, copy=False)


def _leaves(params: dict[str, Any], tensors: list[Tensor]) -> dict[tuple[str, ...], Any]:
  """Parameters by path, which are those of the tensors."""
  keys = lambda path: tuple(str(key.key) for key in path)
  leaves = {keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  expected = {("params", *tensor.path): tensor for tensor in tensors}
  for path in sorted(leaves.keys() ^ expected.keys()):
    what = "missing" if path in expected else "not one of this model"
    raise ValueError(f"parameter {'/'.join(path[1:])} is {what}.")
  for path, tensor in expected.items():
    if leaves[path].shape != tensor.shape:
      raise ValueError(
        f"parameter {_path(tensor)}: found shape {leaves[path].shape}, expected {tensor.shape}."
      )
  return leaves


def _stored(leaves, tensors: list[Tensor], weight_dtype) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of a file, one after another."""
  for tensor in tensors:
    array = np.asarray(leaves["params", *tensor.path])
    if tensor.dtype == "int32":
      dtype = np.dtype(np.int64)
    else:
      dtype = weight_dtype if tensor.dtype == "weight" else np.dtype(np.float32)
      _refuse_rounding(tensor, array, dtype)
    view = _file_axes(tensor, array)
    for piece in _pieces(tensor):
      stored = np.empty(piece.shape, dtype)
      part = view[piece.index]
      _copy(stored.reshape(part.shape), part)
      yield piece.names[0], stored


def _refuse_rounding(tensor: Tensor, array: np.ndarray, dtype: np.dtype) -> None:
  """Raises if the cast to the file's dtype would change a value."""
  narrowed = array.dtype == np.float32 and dtype == ml_dtypes.bfloat16
  if narrowed and (np.ascontiguousarray(array).view(np.uint32) & 0xFFFF).any():
    raise ValueError(
      f"parameter {_path(tensor)} has float32 values that BF16 does not hold: round it first, or "
      "save with dtype float32."
    )


def _path(tensor: Tensor) -> str:
  return "/".join(tensor.path)
