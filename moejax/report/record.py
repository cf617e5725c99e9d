"""The record of a run: what was computed, with what, where."""

import dataclasses
import json
import os
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
