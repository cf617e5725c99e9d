"""The shipped evaluation set, and windows that stay within a document."""

import collections
import pathlib

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from moejax import data
from moejax.checkpoints import Tokenizer
from moejax.data import Document

FOLDER = pathlib.Path(data.__file__).parent
KINDS = {"narrative", "explanation", "dialogue", "letter", "how-to"}


@pytest.fixture(scope="module")
def tokenizer():
  """One token a byte; its own post-processor would add one before every text."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.add_special_tokens(["<s>"])
  backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
  return Tokenizer({}, 256, backend)


def documents(*lengths):
  """Texts of so many tokens, no two with a letter in common."""
  return [Document(str(i), chr(ord("a") + i) * length) for i, length in enumerate(lengths)]


def test_passages_are_balanced():
  splits = {split: data.passages(split) for split in data.SPLITS}
  assert list(splits) == ["calibration", "held_out"]
  for split, passages in splits.items():
    ids = [passage.id for passage in passages]
    assert len(ids) == 48 and ids == sorted(ids)
    assert collections.Counter(passage.language for passage in passages) == {"en": 24, "zh": 24}
    assert all(passage.id.startswith(f"{passage.language}-") for passage in passages)
    for language in ("en", "zh"):
      assert data.passages(split, language) == [p for p in passages if p.language == language]
    rows = list(data.read_objects(FOLDER / "passages" / f"{split}.jsonl"))
    assert all(row.keys() == {"id", "language", "kind", "text"} for row in rows)
    counts = collections.Counter((row["language"], row["kind"]) for row in rows)
    assert counts.keys() == {(language, kind) for language in ("en", "zh") for kind in KINDS}
    assert min(counts.values()) >= 4


@pytest.mark.parametrize("field", ["id", "text"])
def test_no_passage_is_there_twice(field):
  values = [getattr(passage, field) for split in data.SPLITS for passage in data.passages(split)]
  assert len(values) == len(set(values)) == 96


def test_no_paragraph_is_there_twice():
  paragraphs = collections.Counter(
    line
    for split in data.SPLITS
    for passage in data.passages(split)
    for line in passage.text.splitlines()
    if len(line) > 40
  )
  assert max(paragraphs.values()) == 1


@pytest.mark.parametrize("split", ["train", "held-out", ""])
def test_other_splits(split):
  with pytest.raises(
    ValueError, match=r"^the split is '.*', expected one of calibration, held_out"
  ):
    data.passages(split)


@pytest.mark.parametrize("language", ["fr", ""])
def test_other_languages(language):
  with pytest.raises(ValueError, match=r"^the language is '.*', expected en or zh\.$"):
    data.passages("held_out", language)


def test_questions_are_balanced():
  questions = data.questions()
  assert len(questions) == len({question.question for question in questions}) == 120
  assert all(len(set(question.choices)) == 4 for question in questions)
  answers = collections.Counter(question.answer for question in questions)
  assert answers == {0: 30, 1: 30, 2: 30, 3: 30}


def test_windows_are_cut_from_the_start_of_each_document(tokenizer):
  # A tail, nothing left, too short, one token short of two windows.
  texts = documents(11, 15, 4, 9)
  cut = data.windows(texts, tokenizer, 5)
  assert cut.tokens.dtype == cut.document.dtype == np.int32
  assert cut.document.tolist() == [0, 0, 1, 1, 1, 3]
  letters = [tokenizer.backend.token_to_id(text.text[0]) for text in texts]
  assert cut.tokens.tolist() == [[letters[i]] * 5 for i in cut.document]


@pytest.mark.parametrize("split", data.SPLITS)
@pytest.mark.parametrize("time", [97, 256])
def test_windows_of_passages_do_not_cross_documents(tokenizer, split, time):
  passages = data.passages(split)
  cut = data.windows(passages, tokenizer, time)
  for index, passage in enumerate(passages):
    # Said once more with bytes: the tokenizer only renames them.
    raw = passage.text.encode()
    names = tokenizer.backend.encode(passage.text, add_special_tokens=False).ids
    assert len(names) == len(raw)
    rows = cut.tokens[cut.document == index]
    assert len(rows) == len(raw) // time
    assert rows.ravel().tolist() == names[: len(rows) * time]
  assert (np.diff(cut.document) >= 0).all() and cut.tokens.shape == (len(cut.document), time)


def test_a_choice_of_windows(tokenizer):
  passages = data.passages("calibration", "zh")
  everything = data.windows(passages, tokenizer, 64)
  total = len(everything.document)
  for num in (1, 20, total):
    chosen = data.windows(passages, tokenizer, 64, num=num, seed=3)
    order = np.random.default_rng(3).permutation(total)[:num]
    assert chosen.tokens.shape == (num, 64) and len(set(order.tolist())) == num
    np.testing.assert_array_equal(chosen.tokens, everything.tokens[order])
    np.testing.assert_array_equal(chosen.document, everything.document[order])


def test_the_seed_decides(tokenizer):
  draw = lambda seed: data.windows(data.passages("held_out"), tokenizer, 64, num=20, seed=seed)
  first, again, other = draw(0), draw(0), draw(1)
  np.testing.assert_array_equal(first.tokens, again.tokens)
  np.testing.assert_array_equal(first.document, again.document)
  assert (first.document != other.document).any()


@pytest.mark.parametrize(
  "lengths,time,num,message",
  [
    ((9, 4), 5, 2, r"2 documents give 1 windows of 5 tokens, expected at least 2"),
    ((4, 4), 5, None, r"2 documents give 0 windows of 5 tokens, expected at least 1"),
    ((), 5, None, r"0 documents give 0 windows of 5 tokens, expected at least 1"),
    ((9,), 0, None, r"expected 1 or more windows of 1 or more tokens, got None of 0"),
    ((9,), 5, 0, r"expected 1 or more windows of 1 or more tokens, got 0 of 5"),
    ((9,), 5, -1, r"expected 1 or more windows of 1 or more tokens, got -1 of 5"),
  ],
)
def test_too_few_windows(tokenizer, lengths, time, num, message):
  with pytest.raises(ValueError, match=rf"^{message}\.$"):
    data.windows(documents(*lengths), tokenizer, time, num=num)
