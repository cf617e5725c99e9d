"""Tiny random models on disk, with the tokenizer of the nano models: for scripts."""

import functools
import pathlib
import tempfile

from moejax.checkpoints import save, Tokenizer
from moejax.models import config_from_hf
from tests.models import tiny

_NANO = pathlib.Path(__file__).parents[2] / "moejax" / "nano" / "olmoe-nano"
_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def directory(family: str) -> pathlib.Path:
  """Of a model with four experts per token: 24 orders, 12 classes."""
  fields = tiny.FIELDS[family] | dict(vocab_size=6144, num_experts_per_tok=4)
  if family == "deepseek":  # two routed layers behind the dense one
    fields["num_hidden_layers"] = 3
  config = config_from_hf(fields)
  path = pathlib.Path(_FOLDER.name) / f"tiny-{family}"
  save(path, config, tiny.draw(config), Tokenizer.from_directory(_NANO, config.bos_id))
  return path
