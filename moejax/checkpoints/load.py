"""A published checkpoint as a model, its parameters and its tokenizer; and back."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

import jax

from moejax.checkpoints import files
from moejax.checkpoints.tokenizer import Tokenizer
from moejax.checkpoints.weights import load_params, save_params
from moejax.models.config import Config
from moejax.models.execution import Execution, Mode, NATIVE, Taps
from moejax.models.families import config_from_hf, family_of
from moejax.models.model import Model
from moejax.models.state import PersistentState

_MODE, _TAPS = Mode(), Taps()
_SHIPPED = pathlib.Path(__file__).parents[1] / "nano"


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
  """A model and what came with it.

  Attributes:
    module: the flax module.
    config: its record.
    params: {"params": ...}.
    tokenizer: None where the checkpoint has none.
    family: the model_type of config.json.
    name: of the checkpoint's directory.
    directory: where it was read.
  """

  module: Model
  config: Config
  params: dict[str, Any]
  tokenizer: Tokenizer | None
  family: str
  name: str
  directory: pathlib.Path

  def apply(
    self,
    params: dict[str, Any],
    tokens: jax.Array,
    state: PersistentState,
    execution: Execution = NATIVE,
    *,
    mode: Mode = _MODE,
    taps: Taps = _TAPS,
  ) -> tuple[jax.Array, PersistentState, dict[str, jax.Array]]:
    """(logits, state, trace), see `moejax.models.Model`."""
    return self.module.apply(params, tokens, state, execution, mode=mode, taps=taps)

  def init_state(self, batch: int, length: int, mode: Mode = _MODE) -> PersistentState:
    """An empty state for `batch` rows of at most `length` positions."""
    return self.module.init_state(batch, length, mode)

  @functools.cached_property
  def sha256(self) -> str:
    """Of the bytes of the weight files, in the order of their names, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted({entry.path for entry in files.open_checkpoint(self.directory).values()}):
      with open(path, "rb") as file:
        hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def load(name_or_directory: str | os.PathLike, dtype: str = "bfloat16") -> LoadedModel:
  """Reads config.json, the weights and, where there is one, the tokenizer of a checkpoint.

  Args:
    name_or_directory: of a nano model that comes with the package (`shipped`), or a directory in
      the layout of Hugging Face.
    dtype: "bfloat16" or "float32", of the parameters (`load_params`).

  Raises:
    FileNotFoundError: no such model, no weights, or a missing shard.
    ValueError: a config, checkpoint or tokenizer that is damaged or not supported.
  """
  directory = _find_directory(name_or_directory)
  config = config_from_hf(_read_config(directory / "config.json"))
  family = family_of(config)
  # Tied checkpoints of some writers hold the head as well.
  unread = ("lm_head.weight", "head.weight") if config.tie_embeddings else ()
  has_tokenizer = (directory / "tokenizer.json").is_file()
  return LoadedModel(
    module=family(config),
    config=config,
    params=load_params(directory, family.tensors(config), dtype, unread),
    tokenizer=Tokenizer.from_directory(directory, config.bos_id) if has_tokenizer else None,
    family=config.family,
    name=directory.resolve().name,
    directory=directory,
  )


def save(
  directory: str | os.PathLike,
  model: Model | LoadedModel | Config,
  params: dict[str, Any],
  tokenizer: Tokenizer | None = None,
  dtype: str = "bfloat16",
) -> None:
  """Writes a checkpoint that `load` and transformers read.

  Args:
    directory: made if it is not there; a checkpoint in it is replaced.
    model: a model, or its config.
    params: {"params": ...}; values that `dtype` does not hold are refused.
    tokenizer: written too.
    dtype: "bfloat16" or "float32", of the weights in the file.
  """
  config = model if isinstance(model, Config) else model.config
  family = family_of(config)
  tensors, fields = family.tensors(config), family.write_config(config)
  save_params(directory, params, tensors, fields, dtype, tokenizer=tokenizer)


def shipped() -> list[str]:
  """Names of the nano models that come with the package."""
  return sorted(path.parent.name for path in _SHIPPED.glob("*/config.json"))


def _find_directory(name_or_directory: str | os.PathLike) -> pathlib.Path:
  directory = pathlib.Path(name_or_directory)
  if (directory / "config.json").is_file():
    return directory
  if str(name_or_directory) in shipped():
    return _SHIPPED / directory
  raise FileNotFoundError(
    f"no model named {os.fspath(name_or_directory)!r}: expected a directory with config.json, or "
    f"one of {', '.join(shipped())}."
  )


def _read_config(path: pathlib.Path) -> dict[str, Any]:
  try:
    return dict(json.loads(path.read_bytes()))
  except (ValueError, TypeError):
    raise ValueError(f"{path}: expected a JSON object.") from None
