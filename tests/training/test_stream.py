"""The token stream: every window once an epoch, batches by number alone, documents as mixed."""

import numpy as np
import pytest
import tokenizers

from moejax.checkpoints import Tokenizer
from moejax.data import Document
from moejax.training import make_stream, TokenStream

WORDS = ["end", "a", "b", "c", "d"]


def tokenizer():
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  return Tokenizer({"tokenizer.json": backend.to_str().encode()}, None, backend)


def test_every_window_once_an_epoch_and_then_in_another_order():
  stream = TokenStream(np.arange(1000, dtype=np.int32), 10, seed=3)
  assert stream.per_epoch == 98
  epochs = [stream.batch(at, 98) for at in (0, 98, 196)]
  for windows in epochs:
    starts = windows[:, 0]
    assert windows.shape == (98, 11) and windows.dtype == np.int32
    assert (windows == starts[:, None] + np.arange(11)).all()
    assert len(set(starts // 10)) == 98 and len(set(starts % 10)) == 1
  assert len({tuple(np.argsort(windows[:, 0])) for windows in epochs}) == 3


def test_a_batch_is_a_function_of_its_number():
  stream = TokenStream(np.arange(500, dtype=np.int32), 7, seed=0)
  whole = stream.batch(0, 200)  # three epochs
  for first, size in ((0, 3), (68, 5), (137, 60)):
    assert (stream.batch(first, size) == whole[first : first + size]).all()
  other = TokenStream(stream.tokens, 7, seed=1)
  assert (other.batch(0, 60) != whole[:60]).any()


def test_documents_end_with_the_end_token_and_repeat_as_mixed():
  documents = [Document(str(i), "a b" if i % 2 else "c d", "en", "xy"[i % 2]) for i in range(400)]
  stream = make_stream(documents, tokenizer(), 0, 3, seed=5, mixture={"x": 2, "y": 0.25})
  rows = stream.tokens.reshape(-1, 3)
  assert (rows[:, 2] == 0).all()
  assert (rows[:, 0] == WORDS.index("c")).sum() == 400  # twice 200
  assert 30 <= (rows[:, 0] == WORDS.index("a")).sum() <= 70  # about a quarter of 200
  again = make_stream(documents, tokenizer(), 0, 3, seed=5, mixture={"x": 2, "y": 0.25})
  other = make_stream(documents, tokenizer(), 0, 3, seed=6, mixture={"x": 2, "y": 0.25})
  assert again.sha256 == stream.sha256 != other.sha256


def test_too_little_text():
  with pytest.raises(ValueError, match=r"the corpus has 20 tokens, expected at least 21"):
    TokenStream(np.arange(20, dtype=np.int32), 10, 0)
  with pytest.raises(ValueError, match=r"the corpus is empty under this mixture"):
    make_stream([Document("1", "a", "en", "x")], tokenizer(), 0, 3, seed=0, mixture={"x": 0})
