"""Unigram and bigram language models over token ids: baselines for the nano models."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Ngrams:
  """Counts of a training text over V ids, and what they make of other texts; see `count`.

  The unigram model p1 is smoothed by adding one: p1(w) = (c(w) + 1) / (N + V). The bigram model is
  interpolated with it as by Witten and Bell (1991; Chen and Goodman 1999, section 2.6):
  p(w | v) = (c(v, w) + T(v) p1(w)) / (c(v) + T(v)), or p1(w) where v never had a successor.

  Attributes:
    counts: int64 [V], c(w), how often an id occurs; N in all.
    histories: int64 [V], c(v), how often an id has a successor: at the end of the text it has none.
    successors: int64 [V], T(v), how many different ids follow.
    pairs: int64 [P], v * V + w of the pairs that occur, ascending.
    pair_counts: int64 [P], c(v, w).
  """

  counts: np.ndarray
  histories: np.ndarray
  successors: np.ndarray
  pairs: np.ndarray
  pair_counts: np.ndarray

  @property
  def vocab_size(self) -> int:
    """V."""
    return len(self.counts)

  def unigram_nll(self, tokens: np.ndarray) -> np.ndarray:
    """Losses of tokens 1 .. T - 1 without their histories.

    Args:
      tokens: integers [n, T] in 0 .. V - 1, T at least 2.

    Returns:
      float64 [n, T - 1], in nats.

    Raises:
      ValueError: another shape or dtype, fewer than two tokens, or an id out of range.
    """
    _check(tokens, 2, self.vocab_size)
    return -np.log(self._unigram(tokens[:, 1:]))

  def bigram_nll(self, tokens: np.ndarray) -> np.ndarray:
    """Losses of tokens 1 .. T - 1, each after the token before it; otherwise as `unigram_nll`."""
    _check(tokens, 2, self.vocab_size)
    v, w = tokens[:, :-1], tokens[:, 1:]
    pair_count, successors = self._pair_count(v, w), self.successors[v]
    total = self.histories[v] + successors
    unigram = self._unigram(w)
    seen = total > 0
    bigram = (pair_count + successors * unigram) / np.where(seen, total, 1)
    return -np.log(np.where(seen, bigram, unigram))

  def _unigram(self, w: np.ndarray) -> np.ndarray:
    return (self.counts[w] + 1) / (self.counts.sum() + self.vocab_size)

  def _pair_count(self, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    keys = _keys(v, w, self.vocab_size)
    at = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
    return np.where(self.pairs[at] == keys, self.pair_counts[at], 0)


def count(tokens: np.ndarray, vocab_size: int) -> Ngrams:
  """Counts a training text.

  Args:
    tokens: integers [N] in 0 .. V - 1, N at least 2.
    vocab_size: V.

  Raises:
    ValueError: V below 1, another shape or dtype, fewer than two tokens, or an id out of range.
  """
  if vocab_size < 1:
    raise ValueError(f"the vocabulary has size {vocab_size}, expected at least 1.")
  _check(tokens, 1, vocab_size)
  tokens = tokens.astype(np.int64)  # np.bincount refuses uint64.
  pairs, pair_counts = np.unique(_keys(tokens[:-1], tokens[1:], vocab_size), return_counts=True)
  return Ngrams(
    counts=np.bincount(tokens, minlength=vocab_size),
    histories=np.bincount(tokens[:-1], minlength=vocab_size),
    successors=np.bincount(pairs // vocab_size, minlength=vocab_size),
    pairs=pairs,
    pair_counts=pair_counts,
  )


def _keys(v: np.ndarray, w: np.ndarray, vocab_size: int) -> np.ndarray:
  # In int64: V * V passes int32 from a vocabulary of 46341 on.
  keys = v.astype(np.int64)
  keys *= vocab_size
  keys += w.astype(np.int64)
  return keys


def _check(tokens: np.ndarray, rank: int, vocab_size: int):
  """Refuses what is not integer ids of a rank, two or more along the last axis, all in range."""
  if tokens.ndim != rank or not np.issubdtype(tokens.dtype, np.integer):
    shape = ("[N]", "[n, T]")[rank - 1]
    raise ValueError(f"tokens must be integers {shape}, got {tokens.dtype} {tokens.shape}.")
  if tokens.shape[-1] < 2:
    raise ValueError(f"the text has {tokens.shape[-1]} tokens, expected at least 2.")
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(f"ids are {tokens.min()} to {tokens.max()}, expected 0 to {vocab_size - 1}.")
