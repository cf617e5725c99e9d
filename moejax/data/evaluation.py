"""The project's own evaluation set, passages and questions, and windows of tokens to score.

Thresholds and scales are chosen on `calibration`; what is reported is measured on `held_out`.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

import numpy as np

from moejax.checkpoints import Tokenizer
from moejax.data.corpus import Document, read_documents
from moejax.data.questions import Question, read_questions

SPLITS = ("calibration", "held_out")

_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """Windows of tokens, and where they are from.

  Attributes:
    tokens: int32 [n, T].
    document: int32 [n], the index of the document of each; windows of one are no independent draws.
  """

  tokens: np.ndarray
  document: np.ndarray


def passages(split: str, language: str | None = None) -> list[Document]:
  """The passages of a split: 24 in English, 24 in Chinese.

  Args:
    split: one of `SPLITS`.
    language: "en" or "zh"; both by default.

  Raises:
    ValueError: another split or language.
  """
  if split not in SPLITS:
    raise ValueError(f"the split is {split!r}, expected one of {', '.join(SPLITS)}.")
  documents = read_documents(_FOLDER / "passages" / f"{split}.jsonl")
  found = [document for document in documents if language in (None, document.language)]
  if not found:
    raise ValueError(f"the language is {language!r}, expected en or zh.")
  return found


def questions() -> list[Question]:
  """The 120 questions, four choices each, every position the right one equally often."""
  return read_questions(_FOLDER / "questions.jsonl")


def windows(
  documents: Sequence[Document],
  tokenizer: Tokenizer,
  time: int,
  *,
  num: int | None = None,
  seed: int = 0,
) -> Windows:
  """Windows of T tokens, cut one after the other from the start of each document.

  None crosses documents; what is left at the end of a document is dropped.

  Args:
    documents: in the order of the windows.
    tokenizer: no special token is added, BOS neither.
    time: T.
    num: how many, chosen at random and in random order; all, in order, by default.
    seed: of the choice.

  Raises:
    ValueError: `time` or `num` below 1; no window, or fewer than `num`.
  """
  if time < 1 or (num is not None and num < 1):
    raise ValueError(f"expected 1 or more windows of 1 or more tokens, got {num} of {time}.")
  encoded = tokenizer.backend.encode_batch([d.text for d in documents], add_special_tokens=False)
  tokens, document = [], []
  for index, encoding in enumerate(encoded):
    whole = len(encoding.ids) // time
    tokens += encoding.ids[: whole * time]
    document += [index] * whole
  wanted = 1 if num is None else num
  if len(document) < wanted:
    raise ValueError(
      f"{len(documents)} documents give {len(document)} windows of {time} tokens, "
      f"expected at least {wanted}."
    )
  cut = Windows(np.array(tokens, np.int32).reshape(-1, time), np.array(document, np.int32))
  if num is None:
    return cut
  picked = np.random.default_rng(seed).permutation(len(document))[:num]
  return Windows(cut.tokens[picked], cut.document[picked])
