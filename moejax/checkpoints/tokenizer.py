"""Text to token ids and back, from the `tokenizer.json` of a checkpoint."""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import pathlib

import tokenizers

from moejax.report.files import atomic_path

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"

# Prepend BOS unless tokenizer_config.json says otherwise, whatever tokenizer.json would do.
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer as its files describe it.

  Attributes:
    files: contents of tokenizer.json and, where there is one, tokenizer_config.json, by name.
    bos_id: the id before every encoded text, or None.
    backend: what does the work.
  """

  files: dict[str, bytes]
  bos_id: int | None
  backend: tokenizers.Tokenizer

  @classmethod
  def from_directory(cls, directory: str | os.PathLike, bos_id: int | None = None) -> "Tokenizer":
    """Reads the tokenizer of a checkpoint.

    BOS is prepended if tokenizer_config.json says `add_bos_token`, or does not say and names a
    Llama tokenizer, as DeepSeek-MoE does.

    Args:
      directory: with tokenizer.json.
      bos_id: that of config.json, for a tokenizer_config.json that does not name the token.

    Raises:
      FileNotFoundError: no tokenizer.json.
      ValueError: a damaged file, or BOS is wanted and nothing says which token that is.
    """
    paths = [pathlib.Path(directory, name) for name in (_TOKENIZER, _CONFIG)]
    if not paths[0].is_file():
      raise FileNotFoundError(f"no tokenizer in {directory}: expected {_TOKENIZER}.")
    contents = {path.name: path.read_bytes() for path in paths if path.is_file()}
    config = _read_config(contents.get(_CONFIG, b"{}"))
    backend = _read_tokenizer(contents[_TOKENIZER])
    if not _adds_bos(config):
      return cls(contents, None, backend)
    token = config.get("bos_token")
    token = token["content"] if isinstance(token, dict) else token
    if token is not None:
      bos_id = backend.token_to_id(token)
    if bos_id is None:
      raise ValueError(f"{_CONFIG} asks for BOS, but its token {token!r} has no id.")
    return cls(contents, bos_id, backend)

  def encode(self, text: str) -> list[int]:
    """Ids of a text; no special token is added but BOS, where the model has it.

    Raises:
      ValueError: an empty text.
    """
    if not text:
      raise ValueError("the prompt is empty.")
    ids = self.backend.encode(text, add_special_tokens=False).ids
    return ids if self.bos_id is None else [self.bos_id, *ids]

  def decode(self, ids: Sequence[int]) -> str:
    """The text of a whole sequence, without special tokens; U+FFFD for each of `unknown`."""
    unknown, text, known = set(self.unknown(ids)), [], []
    for token in map(int, ids):
      if token in unknown:
        text += [self.backend.decode(known, skip_special_tokens=True), "\ufffd"]
        known = []
      else:
        known.append(token)
    return "".join([*text, self.backend.decode(known, skip_special_tokens=True)])

  def unknown(self, ids: Sequence[int]) -> list[int]:
    """The ids that the vocabulary lacks, such as those of padding rows of an embedding."""
    ids = map(int, ids)
    return [i for i in ids if not 0 <= i < 2**32 or self.backend.id_to_token(i) is None]

  def save(self, directory: str | os.PathLike) -> None:
    """Writes the files as they were read."""
    for name, content in self.files.items():
      with atomic_path(pathlib.Path(directory, name)) as path:
        path.write_bytes(content)

  @property
  def vocab_size(self) -> int:
    """Tokens of the vocabulary, the added ones among them; an embedding may have more rows."""
    return self.backend.get_vocab_size(with_added_tokens=True)

  @property
  def sha256(self) -> str:
    """Of tokenizer.json, in hexadecimal."""
    return hashlib.sha256(self.files[_TOKENIZER]).hexdigest()


def _read_tokenizer(content: bytes) -> tokenizers.Tokenizer:
  try:
    backend = tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(f"{_TOKENIZER} is not a tokenizer: {error}.") from None
  # A file may remember how batches were cut and filled when it was made.
  backend.no_truncation()
  backend.no_padding()
  return backend


def _read_config(content: bytes) -> dict:
  try:
    return dict(json.loads(content))
  except (ValueError, TypeError):
    raise ValueError(f"{_CONFIG}: expected a JSON object.") from None


def _adds_bos(config: dict) -> bool:
  if config.get("add_bos_token") is not None:
    return bool(config["add_bos_token"])
  return config.get("tokenizer_class") in _LLAMA_CLASSES
