"""N-gram baselines: distributions, against exact rationals, and what they refuse."""

import fractions
import itertools
import math

import numpy as np
import pytest

from moejax.analysis import ngrams

V = 7
# Id 5 is seen but never has a successor, id 6 is not seen at all.
TEXT = np.append(np.random.default_rng(0).integers(5, size=23), 5)


class Oracle:
  """The two models in rationals, from dictionaries of counts."""

  def __init__(self, text: list[int], vocab_size: int):
    self.size, self.vocab_size = len(text), vocab_size
    self.words, self.following = {}, {}
    for word in text:
      self.words[word] = self.words.get(word, 0) + 1
    for history, word in itertools.pairwise(text):
      after = self.following.setdefault(history, {})
      after[word] = after.get(word, 0) + 1

  def unigram(self, word: int) -> fractions.Fraction:
    return fractions.Fraction(self.words.get(word, 0) + 1, self.size + self.vocab_size)

  def bigram(self, history: int, word: int) -> fractions.Fraction:
    after = self.following.get(history)
    if after is None:
      return self.unigram(word)
    kinds, total = len(after), sum(after.values())
    return (after.get(word, 0) + kinds * self.unigram(word)) / (total + kinds)


def exact_nll(oracle: Oracle, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Unigram and bigram losses, float64 [n, T - 1] each."""
  unigram = [[-math.log(oracle.unigram(w)) for w in row[1:]] for row in rows.tolist()]
  bigram = [
    [-math.log(oracle.bigram(v, w)) for v, w in itertools.pairwise(row)] for row in rows.tolist()
  ]
  return np.array(unigram), np.array(bigram)


def all_pairs() -> np.ndarray:
  """Every history before every word: int64 [V * V, 2]."""
  return np.array(list(itertools.product(range(V), repeat=2)))


def test_every_history_has_a_distribution():
  model = ngrams.count(TEXT, V)
  for nll in (model.unigram_nll(all_pairs()), model.bigram_nll(all_pairs())):
    probability = np.exp(-nll).reshape(V, V)
    assert (probability > 0).all()
    np.testing.assert_allclose(probability.sum(axis=1), np.ones(V), rtol=0, atol=1e-14)


def test_a_history_without_successors_leaves_the_unigram():
  model = ngrams.count(TEXT, V)
  same = (model.unigram_nll(all_pairs()) == model.bigram_nll(all_pairs())).reshape(V, V)
  assert same[5:].all() and not same[:5].all(axis=1).any()


@pytest.mark.parametrize(
  "vocab_size,dtype",
  [(V, np.int64), (V, np.uint64), (211, np.uint8), (70_001, np.int32)],
)
def test_losses_are_those_of_exact_rationals(vocab_size, dtype):
  # Ids from both ends of the vocabulary, where products of narrow integers would wrap.
  ids = np.array([0, 1, 2, vocab_size - 3, vocab_size - 2, vocab_size - 1], dtype)
  rng = np.random.default_rng(1)
  text, rows = ids[rng.integers(1, 5, size=29)], ids[rng.integers(6, size=(11, 13))]
  assert text.dtype == rows.dtype == dtype
  model = ngrams.count(text, vocab_size)
  unigram, bigram = exact_nll(Oracle(text.tolist(), vocab_size), rows)
  for ours, exact in ((model.unigram_nll(rows), unigram), (model.bigram_nll(rows), bigram)):
    assert ours.dtype == np.float64 and ours.shape == (11, 12)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-14)


def test_a_hand_worked_text():
  # c(0) = 2 with successors 1 and 2; p1 = (3, 2, 2, 1) / 8.
  model = ngrams.count(np.array([0, 1, 0, 2]), 4)
  rows = np.array([[0, 1], [0, 3], [1, 0], [2, 0]])
  expected = [[(1 + 2 * 2 / 8) / 4], [(2 * 1 / 8) / 4], [(1 + 3 / 8) / 2], [3 / 8]]
  np.testing.assert_allclose(np.exp(-model.bigram_nll(rows)), expected, rtol=1e-15)


def test_a_markov_text_is_better_told_with_histories():
  rng = np.random.default_rng(2)
  transition = rng.dirichlet(np.full(11, 0.2), size=11)
  text = [0]
  for _ in range(3000):
    text.append(rng.choice(11, p=transition[text[-1]]))
  text = np.array(text)
  model = ngrams.count(text, 11)
  gain = model.unigram_nll(text[None]).mean() - model.bigram_nll(text[None]).mean()
  assert gain > 0.3


def test_no_rows_have_no_losses():
  model = ngrams.count(TEXT, V)
  assert model.bigram_nll(np.zeros((0, 5), int)).shape == (0, 4)


@pytest.mark.parametrize(
  "tokens,vocab_size,message",
  [
    ([0, 1], 0, "the vocabulary has size 0, expected at least 1"),
    ([0, 7, 3], V, "ids are 0 to 7, expected 0 to 6"),
    ([0, -1, 3], V, "ids are -1 to 3, expected 0 to 6"),
    ([3], V, "the text has 1 tokens, expected at least 2"),
    ([0.0, 1.0], V, r"tokens must be integers \[N\], got float64 \(2,\)"),
    ([[0, 1]], V, r"tokens must be integers \[N\], got int64 \(1, 2\)"),
  ],
)
def test_bad_training_texts_are_refused(tokens, vocab_size, message):
  with pytest.raises(ValueError, match=message):
    ngrams.count(np.array(tokens), vocab_size)


@pytest.mark.parametrize("method", ["unigram_nll", "bigram_nll"])
@pytest.mark.parametrize(
  "tokens,message",
  [
    ([[7, 0]], "ids are 0 to 7, expected 0 to 6"),
    ([[0, -1]], "ids are -1 to 0, expected 0 to 6"),
    ([[0], [1]], "the text has 1 tokens, expected at least 2"),
    ([[0.0, 1.0]], r"tokens must be integers \[n, T\], got float64 \(1, 2\)"),
    ([0, 1], r"tokens must be integers \[n, T\], got int64 \(2,\)"),
  ],
)
def test_bad_texts_are_refused(method, tokens, message):
  with pytest.raises(ValueError, match=message):
    getattr(ngrams.count(TEXT, V), method)(np.array(tokens))
