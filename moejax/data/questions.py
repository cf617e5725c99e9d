"""Multiple-choice questions as JSON lines, flat or as the ARC release has them.

    {"id": "q-001", "question": "...", "choices": ["...", "..."], "answer": 0}
    {"id": "q-001", "question": {"stem": "...", "choices": [{"text": "...", "label": "A"}, ...]},
     "answerKey": "A"}

A file may mix the two; other fields are not kept.
"""

import dataclasses
import os

from moejax.data.corpus import read_objects


@dataclasses.dataclass(frozen=True)
class Question:
  """A question with one right answer.

  Attributes:
    id: unique within its file.
    question: not empty.
    choices: two or more, none empty.
    answer: the index of the right choice.
  """

  id: str
  question: str
  choices: tuple[str, ...]
  answer: int


def read_questions(path: str | os.PathLike) -> list[Question]:
  """The questions of one file.

  Raises:
    ValueError: as `read_objects`; a missing or invalid field, fewer than two choices, an answer
      that is none of them, an id that is there twice; no question at all.
  """
  questions = {}
  for number, value in enumerate(read_objects(path), start=1):
    where = f"{path}: object {number}"
    question = _question(value, where)
    if question.id in questions:
      raise ValueError(f"{where} repeats the id {question.id!r}.")
    questions[question.id] = question
  if not questions:
    raise ValueError(f"{path}: no questions.")
  return list(questions.values())


def _question(value: dict, where: str) -> Question:
  if isinstance(value.get("question"), dict):
    value = _flattened(value, where)
  for field in ("id", "question"):
    if not _is_text(value.get(field)):
      raise ValueError(f"{where} has no {field}: expected a string that is not empty.")
  choices, answer = value.get("choices"), value.get("answer")
  if not isinstance(choices, list) or not all(map(_is_text, choices)):
    raise ValueError(f"{where}: expected choices that are a list of strings, none empty.")
  if len(choices) < 2:
    raise ValueError(f"{where}: expected two or more choices, got {len(choices)}.")
  if type(answer) is not int or not 0 <= answer < len(choices):
    raise ValueError(f"{where}: expected an answer from 0 to {len(choices) - 1}, got {answer!r}.")
  return Question(value["id"], value["question"], tuple(choices), answer)


def _flattened(value: dict, where: str) -> dict:
  question, key = value["question"], value.get("answerKey")
  choices = question.get("choices")
  if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
    raise ValueError(f"{where}: expected choices that are a list of objects with text and label.")
  labels = [choice.get("label") for choice in choices]
  if not all(map(_is_text, labels)) or len(set(labels)) < len(labels):
    raise ValueError(f"{where}: expected labels that are different strings, got {labels}.")
  if key not in labels:
    raise ValueError(f"{where}: expected an answerKey among the labels {labels}, got {key!r}.")
  return {
    "id": value.get("id"),
    "question": question.get("stem"),
    "choices": [choice.get("text") for choice in choices],
    "answer": labels.index(key),
  }


def _is_text(value) -> bool:
  return isinstance(value, str) and bool(value)
