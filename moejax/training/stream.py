"""The training text as one stream of tokens, and batches of it by number.

Documents are repeated as the mixture says, shuffled, and joined with an end token. Batches are a
pure function of seed and position: a run that goes on from a position sees the data it would have
seen.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib

import numpy as np

from moejax.checkpoints import Tokenizer
from moejax.data.corpus import Document


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
  """Windows of a stream of tokens, in an order of their own in every epoch.

  Attributes:
    tokens: int32 [N].
    length: T; a window has T + 1 tokens, the last of which is the first of the next.
    seed: of the order.
  """

  tokens: np.ndarray
  length: int
  seed: int

  def __post_init__(self):
    if self.per_epoch < 1:
      raise ValueError(
        f"the corpus has {len(self.tokens)} tokens, expected at least {2 * self.length + 1}."
      )

  @property
  def per_epoch(self) -> int:
    """Windows in an epoch."""
    return (len(self.tokens) - 1) // self.length - 1

  @functools.cached_property
  def sha256(self) -> str:
    """Of the tokens."""
    return hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()

  def batch(self, first: int, size: int) -> np.ndarray:
    """Windows first .. first + size - 1 of the endless order: int32 [size, T + 1]."""
    return np.stack([self._window(number) for number in range(first, first + size)])

  def _window(self, number: int) -> np.ndarray:
    epoch, index = divmod(number, self.per_epoch)
    offset, order = self._epoch(epoch)
    at = offset + int(order[index]) * self.length
    return self.tokens[at : at + self.length + 1]

  def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
    return _epoch_order(self.seed, epoch, self.per_epoch, self.length)


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int, length: int) -> tuple[int, np.ndarray]:
  rng = np.random.default_rng([seed, epoch])
  return int(rng.integers(length)), rng.permutation(windows)


def make_stream(
  documents: Sequence[Document],
  tokenizer: Tokenizer,
  end_id: int,
  length: int,
  seed: int,
  mixture: Mapping[str, float],
) -> TokenStream:
  """The stream of a corpus.

  Args:
    documents: of the training split.
    tokenizer: no special token is added.
    end_id: the token after every document.
    length: T of the windows.
    seed: of the shuffle, of fractional repeats and of the windows.
    mixture: how often the documents of a source are repeated, on average; 1 by default.
  """
  encoded = tokenizer.backend.encode_batch([d.text for d in documents], add_special_tokens=False)
  ids = [np.array([*e.ids, end_id], np.int32) for e in encoded]
  rng = np.random.default_rng(seed)
  picked = []
  for index, document in enumerate(documents):
    repeats = mixture.get(document.source, 1)
    picked += [index] * (int(repeats) + int(rng.random() < repeats - int(repeats)))
  rng.shuffle(picked)
  if not picked:
    raise ValueError("the corpus is empty under this mixture.")
  return TokenStream(np.concatenate([ids[index] for index in picked]), length, seed)
