"""Text corpora on disk: documents as JSON lines, and folders of them with a manifest.

A corpus is a folder with `manifest.json`:

    {"sources": {name: {"lang": "en", "licence": "...", "splits": {"train": {"file": "..."}}}}}

Each file has one JSON object a line with `text` and, optionally, `id`; `.jsonl`, `.jsonl.xz` and
`.jsonl.gz` are read.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import gzip
import json
import lzma
import os
import pathlib
import zlib

_OPENERS = {".jsonl": open, ".xz": lzma.open, ".gz": gzip.open}


@dataclasses.dataclass(frozen=True)
class Document:
  """A text.

  Attributes:
    id: that of its line, or the line's number; published corpora repeat ids.
    text: not empty.
    language: "en", "zh", ...; empty if unknown.
    source: where it is from; the name of the file if unknown.
  """

  id: str
  text: str
  language: str = ""
  source: str = ""


def read_objects(path: str | os.PathLike) -> Iterator[dict]:
  """The JSON objects of a .jsonl, .jsonl.xz or .jsonl.gz file, one a line; blank lines are skipped.

  Raises:
    ValueError: another suffix, damaged compression, or a line that is not a JSON object.
  """
  path = pathlib.Path(path)
  if path.suffix not in _OPENERS:
    raise ValueError(f"{path}: expected .jsonl, .jsonl.xz or .jsonl.gz.")
  try:
    with _OPENERS[path.suffix](path, "rt", encoding="utf-8") as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          yield _object(path, number, line)
  except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: damaged: {error}.") from None


def _object(path, number: int, line: str) -> dict:
  try:
    value = json.loads(line)
  except ValueError:
    value = None
  if not isinstance(value, dict):
    raise ValueError(f"{path}: line {number} is not a JSON object.")
  return value


def read_documents(path: str | os.PathLike, language: str = "", source: str = "") -> list[Document]:
  """The documents of one file; a line's own `language` goes before the argument.

  Raises:
    ValueError: as `read_objects`; a line without `text`; no document at all.
  """
  source = source or pathlib.Path(path).name.split(".")[0]
  documents = []
  for number, value in enumerate(read_objects(path), start=1):
    text = value.get("text")
    if not isinstance(text, str) or not text:
      raise ValueError(f"{path}: object {number} has no text.")
    name = str(value.get("id", number))
    documents.append(Document(name, text, value.get("language", language), source))
  if not documents:
    raise ValueError(f"{path}: no documents.")
  return documents


def read_corpus(
  directory: str | os.PathLike,
  split: str,
  languages: Sequence[str] = (),
  sources: Sequence[str] = (),
) -> list[Document]:
  """The documents of one split, in the order of the manifest.

  Args:
    directory: with manifest.json.
    split: "train", "calibration", "test", ...
    languages: those wanted, each of which must be there; all by default.
    sources: the names wanted; all by default.

  Raises:
    FileNotFoundError: no manifest, or a file that it names is missing.
    ValueError: a damaged file, no documents, or none in a wanted language or of a wanted source.
  """
  directory = pathlib.Path(directory)
  manifest = directory / "manifest.json"
  if not manifest.is_file():
    raise FileNotFoundError(f"no corpus in {directory}: expected manifest.json.")
  try:
    entries = json.loads(manifest.read_text(encoding="utf-8"))["sources"].items()
    wanted = [
      (name, entry["lang"], directory / entry["splits"][split]["file"])
      for name, entry in entries
      if split in entry["splits"]
      and (not languages or entry["lang"] in languages)
      and (not sources or name in sources)
    ]
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(f"{manifest}: expected sources with lang and splits.") from None
  documents = []
  for name, language, path in wanted:
    documents += read_documents(path, language, name)
  for language in languages:
    if all(document.language != language for document in documents):
      raise ValueError(f"{directory}: no {split} document in language {language!r}.")
  for name in sources:
    if all(name != found for found, _, _ in wanted):
      raise ValueError(f"{directory}: no {split} documents of source {name!r}.")
  if not documents:
    raise ValueError(f"{directory}: no {split} documents.")
  return documents
