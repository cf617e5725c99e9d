"""The record of a run: what was computed, with what, where; and whether a folder is that run's."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from moejax.checkpoints import LoadedModel
from moejax.models import Mode
from moejax.numerics import probe_environment
from moejax.report.files import atomic_path


def run_record(model: LoadedModel, mode: Mode, **more: Any) -> dict[str, Any]:
  """Model and hashes, static choices with the contract they mean, environment, and more."""
  return dict(
    model=model.name,
    family=model.family,
    weights_sha256=model.sha256,
    tokenizer_sha256=model.tokenizer.sha256 if model.tokenizer else None,
    mode=dataclasses.asdict(mode),
    contract=dataclasses.asdict(model.module.contract(mode)),
    environment=dataclasses.asdict(probe_environment()),
    **more,
  )


def write_json(path: str | os.PathLike, record: dict[str, Any]) -> None:
  """Writes a record atomically."""
  text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
  with atomic_path(path) as temporary:
    temporary.write_text(text, encoding="utf-8")


def claim(path: str | os.PathLike, record: dict[str, Any]) -> None:
  """Writes the record of a folder's run, or compares with the one that is there.

  The environment may be another one: it is kept as it was.

  Raises:
    ValueError: the folder holds another run; says in what it differs.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    write_json(path, record)
    return
  found = json.loads(path.read_text(encoding="utf-8"))
  mine = json.loads(json.dumps(record))
  for part in mine:
    if part != "environment" and found.get(part) != mine[part]:
      difference = _difference(part, found.get(part), mine[part])
      raise ValueError(f"{path.parent}: holds a run with another {difference}.")


def _difference(part: str, found: Any, mine: Any) -> str:
  if isinstance(found, dict) and isinstance(mine, dict):
    key = next(key for key in {**mine, **found} if found.get(key) != mine.get(key))
    return f"{part}: {key} is {found.get(key)!r}, expected {mine.get(key)!r}"
  if part.endswith("_sha256"):
    return part.removesuffix("_sha256")
  return f"{part}: it is {found!r}, expected {mine!r}"
