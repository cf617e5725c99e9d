"""Reads and writes safetensors checkpoints: one file, or shards with an index.

Headers are read at once, tensors when asked for. The bytes are mapped here rather than by the
safetensors library, whose NumPy side has no FP8 and no E8M0; the library writes.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import json
import math
import os
import pathlib
import tempfile

import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.report.files import atomic_path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# FP8 and E8M0 stay codes; the decoders of moejax.numerics take them so.
DTYPES = {
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
  "F32": np.dtype(np.float32),
  "F8_E4M3": np.dtype(np.uint8),
  "F8_E8M0": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "I32": np.dtype(np.int32),
  "I64": np.dtype(np.int64),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where one tensor of a checkpoint stands.

  Attributes:
    name: of the tensor.
    path: of its file.
    dtype: as the format names it, "BF16" for example.
    shape: of the tensor.
    start: its first byte in the file.
    size: its bytes.
  """

  name: str
  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  size: int

  def read(self) -> np.ndarray:
    """The tensor with its exact bits, mapped from the file and read-only.

    The file is open as long as the array lives. FP8 and E8M0 come as uint8 codes.

    Raises:
      ValueError: a dtype that is not in DTYPES.
    """
    if self.dtype not in DTYPES:
      known = ", ".join(DTYPES)
      raise ValueError(f"tensor {self.name}: dtype {self.dtype} is none of {known}.")
    raw = np.memmap(self.path, np.uint8, "r", self.start, (self.size,))
    return np.asarray(raw).view(DTYPES[self.dtype]).reshape(self.shape)


def open_checkpoint(directory: str | os.PathLike) -> dict[str, Entry]:
  """The tensors of a checkpoint by name; `model.safetensors` goes before an index.

  Raises:
    FileNotFoundError: no checkpoint, or a shard that the index names is missing.
    ValueError: a damaged or truncated file, or an index that names a tensor its shard lacks.
  """
  directory = pathlib.Path(directory)
  if (directory / SINGLE).is_file():
    return _read_header(directory / SINGLE)
  if not (directory / INDEX).is_file():
    raise FileNotFoundError(f"no checkpoint in {directory}: expected {SINGLE} or {INDEX}.")
  weight_map = _read_weight_map(directory / INDEX)
  shards = {shard: _read_shard(directory, shard) for shard in sorted(set(weight_map.values()))}
  for name, shard in weight_map.items():
    if name not in shards[shard]:
      raise ValueError(f"{INDEX}: tensor {name} is not in {shard}, which should hold it.")
  return {name: shards[shard][name] for name, shard in weight_map.items()}


def write_checkpoint(
  directory: str | os.PathLike,
  tensors: Iterable[tuple[str, np.ndarray]],
  max_shard_bytes: int,
) -> None:
  """Writes tensors as one file, or as shards and an index, in place of any checkpoint there.

  Whatever stops it while it writes, the old checkpoint stays. Only one shard is in memory.

  Args:
    directory: made if it is not there.
    tensors: names and C-contiguous arrays, of which a shard's worth is held at a time.
    max_shard_bytes: of tensors in a file; a larger tensor has a file of its own.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=".model-", dir=directory) as temporary:
    shards = []
    for shard in _shards(tensors, max_shard_bytes):
      path = pathlib.Path(temporary, str(len(shards)))
      safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
      path.chmod(0o644)
      shards.append((path, {name: array.nbytes for name, array in shard.items()}))
      del shard  # before the next one grows
    _publish(directory, shards)


def _read_weight_map(path: pathlib.Path) -> dict[str, str]:
  try:
    return dict(json.loads(path.read_bytes())["weight_map"])
  except (ValueError, KeyError, TypeError):
    raise ValueError(f"{path}: expected JSON with a weight_map from tensors to files.") from None


def _read_shard(directory: pathlib.Path, shard: str) -> dict[str, Entry]:
  if not (directory / shard).is_file():
    raise FileNotFoundError(f"{directory}: shard {shard}, which {INDEX} names, is missing.")
  return _read_header(directory / shard)


def _read_header(path: pathlib.Path) -> dict[str, Entry]:
  """The tensors of one file: 8 bytes of header length, a JSON header, the tensors' bytes."""
  size = path.stat().st_size
  with open(path, "rb") as file:
    start = 8 + int.from_bytes(file.read(8), "little")
    if not 8 < start <= size:
      raise ValueError(f"{path}: truncated or no safetensors file, its header does not fit.")
    header = file.read(start - 8)
  try:
    fields = json.loads(header)
    fields.pop("__metadata__", None)
    entries = {name: _entry(name, path, start, field) for name, field in fields.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{path}: the safetensors header is damaged ({error}).") from None
  end = max((entry.start + entry.size for entry in entries.values()), default=start)
  if end != size:
    raise ValueError(f"{path}: truncated or damaged, its tensors end at {end} of {size} bytes.")
  return entries


def _entry(name: str, path: pathlib.Path, start: int, field: dict) -> Entry:
  begin, end = field["data_offsets"]
  entry = Entry(name, path, field["dtype"], tuple(field["shape"]), start + begin, end - begin)
  itemsize = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
  if begin < 0 or (itemsize is not None and entry.size != math.prod(entry.shape) * itemsize):
    raise ValueError(f"{name} has {entry.size} bytes")
  return entry


def _shards(tensors, max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
  shard: dict[str, np.ndarray] = {}
  size = 0
  for name, array in tensors:
    if shard and size + array.nbytes > max_bytes:
      yield shard
      shard, size = {}, 0
    shard[name] = array
    size += array.nbytes
  yield shard


def _publish(directory: pathlib.Path, shards: list[tuple[pathlib.Path, dict[str, int]]]) -> None:
  """Renames finished shards into place, the index last, and drops files of the old checkpoint."""
  total = len(shards)
  names = [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
  names = names if total > 1 else [SINGLE]
  # An old index over new shards of the same names would read as a whole checkpoint.
  (directory / INDEX).unlink(missing_ok=True)
  for name, (path, _) in zip(names, shards):
    os.replace(path, directory / name)
  if total > 1:
    weight_map = {tensor: name for name, (_, sizes) in zip(names, shards) for tensor in sizes}
    size = sum(sum(sizes.values()) for _, sizes in shards)
    with atomic_path(directory / INDEX) as path:
      index = {"metadata": {"total_size": size}, "weight_map": weight_map}
      path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
  for path in {directory / SINGLE, *directory.glob("model-*-of-*.safetensors")}:
    if path.name not in names:
      path.unlink(missing_ok=True)
