"""Questions in two formats, and what is wrong in a file, said in one sentence."""

import gzip
import json
import lzma

import pytest

from moejax.data import Question, read_questions

FLAT = {"id": "q", "question": "Which one?", "choices": ["a nail", "梳子", "a cup"], "answer": 2}


def release(labels="ABC", key="C", **fields):
  """`FLAT` as the ARC release would have it."""
  choices = [{"text": text, "label": label} for text, label in zip(FLAT["choices"], labels)]
  stem = {"stem": FLAT["question"], "choices": choices}
  return {"id": FLAT["id"], "question": stem, "answerKey": key, **fields}


def flat(**fields):
  return {**FLAT, **fields}


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.mark.parametrize(
  "row", [FLAT, flat(labels=[*"ABC"]), release(), release("123", "3"), release("CAB", "B", x=1)]
)
def test_both_formats_give_the_same_record(tmp_path, row):
  path = write(tmp_path / "some.jsonl", [flat(id="first", answer=0), row, release(id="last")])
  choices = ("a nail", "梳子", "a cup")
  assert read_questions(path) == [
    Question("first", "Which one?", choices, 0),
    Question("q", "Which one?", choices, 2),
    Question("last", "Which one?", choices, 2),
  ]


@pytest.mark.parametrize("suffix,opener", [(".xz", lzma.open), (".gz", gzip.open)])
def test_compressed_files(tmp_path, suffix, opener):
  path = write(tmp_path / "some.jsonl", [FLAT])
  packed = tmp_path / f"some.jsonl{suffix}"
  with opener(packed, "wb") as file:
    file.write(path.read_bytes())
  assert read_questions(packed) == read_questions(path)


def without(row, field):
  return {name: value for name, value in row.items() if name != field}


def question(**fields):
  """A row of the release whose inner object is changed."""
  return release(question={**release()["question"], **fields})


STRING = r"expected a string that is not empty"
STRINGS = r": expected choices that are a list of strings, none empty"
OBJECTS = r": expected choices that are a list of objects with text and label"


@pytest.mark.parametrize(
  "row,message",
  [
    ({}, rf" has no id: {STRING}"),
    (without(FLAT, "id"), rf" has no id: {STRING}"),
    (flat(id=7), rf" has no id: {STRING}"),
    (without(release(), "id"), rf" has no id: {STRING}"),
    (without(FLAT, "question"), rf" has no question: {STRING}"),
    (flat(question=""), rf" has no question: {STRING}"),
    (question(stem=None), rf" has no question: {STRING}"),
    (without(FLAT, "choices"), STRINGS),
    (flat(choices="abc"), STRINGS),
    (flat(choices=["a", "", "c"]), STRINGS),
    (flat(choices=["a", 2, "c"]), STRINGS),
    (question(choices=[{"label": "C"}, {"label": "D"}]), STRINGS),
    (question(choices=None), OBJECTS),
    (question(choices=["a", "b"]), OBJECTS),
    (flat(choices=[]), r": expected two or more choices, got 0"),
    (flat(choices=["a"], answer=0), r": expected two or more choices, got 1"),
    (release("C"), r": expected two or more choices, got 1"),
    (without(FLAT, "answer"), r": expected an answer from 0 to 2, got None"),
    (flat(answer=3), r": expected an answer from 0 to 2, got 3"),
    (flat(answer=-1), r": expected an answer from 0 to 2, got -1"),
    (flat(answer="2"), r": expected an answer from 0 to 2, got '2'"),
    (flat(answer=True), r": expected an answer from 0 to 2, got True"),
    (flat(answer=1.0), r": expected an answer from 0 to 2, got 1.0"),
    (release(key="D"), r": expected an answerKey among the labels \['A', 'B', 'C'\], got 'D'"),
    (release("123", 3), r": expected an answerKey among the labels \['1', '2', '3'\], got 3"),
    (without(release(), "answerKey"), r": expected an answerKey among the labels .*, got None"),
    (release("ACC"), r": expected labels that are different strings, got \['A', 'C', 'C'\]"),
    (release([1, 2, 3], 3), r": expected labels that are different strings, got \[1, 2, 3\]"),
    (FLAT | {"id": "first"}, r" repeats the id 'first'"),
    (release(id="first"), r" repeats the id 'first'"),
  ],
)
def test_what_is_refused(tmp_path, row, message):
  path = write(tmp_path / "some.jsonl", [flat(id="first"), row])
  with pytest.raises(ValueError, match=rf"/some\.jsonl: object 2{message}\.$"):
    read_questions(path)


def test_an_empty_file(tmp_path):
  (tmp_path / "some.jsonl").write_text("\n")
  with pytest.raises(ValueError, match=r"/some\.jsonl: no questions\.$"):
    read_questions(tmp_path / "some.jsonl")
