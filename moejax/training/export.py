"""A trained model as a checkpoint, and the picture of its training.

Beside the files of Hugging Face's layout a checkpoint has `training.json`: what it was trained on,
how far, and where the text stream stands. A new run can start there; its optimiser starts anew.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints import load_params, save
from moejax.models.families import config_from_hf, family_of
from moejax.models.parameters import parameter_dtype
from moejax.report.files import atomic_path
from moejax.report.record import write_json
from moejax.training.loop import Progress, Run

_RECORD = "training.json"


def write_model(run: Run, params: dict[str, Any], progress: Progress) -> None:
  """Writes DIRECTORY/model: BF16 weights, config.json, tokenizer and training.json."""
  directory = run.directory / "model"
  save(directory, run.config, round_params(run, params), run.tokenizer)
  record = dict(
    step=progress.step,
    steps=run.recipe.steps,
    tokens=progress.step * run.recipe.batch * run.recipe.length,
    minutes=round(progress.seconds / 60, 1),
    nll=round(progress.nll, 4),
    stream_tokens=len(run.stream.tokens),
    recipe=dataclasses.asdict(run.recipe),
    text_sha256=run.stream.sha256,
    tokenizer_sha256=run.tokenizer.sha256,
  )
  write_json(directory / _RECORD, record)


def round_params(run: Run, params: dict[str, Any]) -> dict[str, Any]:
  """The parameters as a checkpoint keeps them: weights in BF16."""
  tensors = {t.path: t for t in family_of(run.config).tensors(run.config)}

  def cast(path, x):
    return x.astype(parameter_dtype(tensors[tuple(entry.key for entry in path)], "bfloat16"))

  return {"params": jax.tree_util.tree_map_with_path(cast, params["params"])}


def read_start(directory: str | os.PathLike, run: Run) -> tuple[dict[str, Any], int]:
  """(float32 parameters, step) of a checkpoint that a run may go on from.

  Raises:
    FileNotFoundError: no training.json.
    ValueError: the checkpoint is of another config, tokenizer or text.
  """
  directory = pathlib.Path(directory)
  path = directory / _RECORD
  if not path.is_file():
    raise FileNotFoundError(f"{directory}: expected {_RECORD}, to say where training stands.")
  record = json.loads(path.read_text(encoding="utf-8"))
  config = config_from_hf(json.loads((directory / "config.json").read_text(encoding="utf-8")))
  mine = run.identity()
  if config != run.config:
    raise ValueError(f"{directory}: is a model of another config.")
  for part in ("tokenizer_sha256", "text_sha256"):
    if record[part] != mine[part]:
      raise ValueError(f"{directory}: was trained with another {part.removesuffix('_sha256')}.")
  params = load_params(directory, family_of(config).tensors(config), "float32")
  done = record["step"] * record["recipe"]["batch"] // run.recipe.batch
  return jax.tree.map(jnp.asarray, params), done


def draw_training(path: str | os.PathLike, rows: list[dict[str, Any]]) -> None:
  """Loss, and the load of the fullest and emptiest expert, over tokens."""
  import matplotlib.figure  # the extra `plots`

  tokens = np.array([row["tokens"] for row in rows]) / 1e6
  figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  left.plot(tokens, [row["nll"] for row in rows], linewidth=1)
  left.set(xlabel="million tokens", ylabel="training loss, nats per token")
  for name, label in (("max_load", "fullest expert"), ("min_load", "emptiest expert")):
    loads = np.array([row[name] for row in rows])
    right.plot(tokens, loads.mean(axis=1), linewidth=1, label=f"{label}, mean of layers")
  right.axhline(1.0, color="0.7", linewidth=0.8)
  right.set(
    xlabel="million tokens", ylabel="tokens of an expert over the even share", ylim=(0, None)
  )
  right.legend(frameon=False)
  with atomic_path(path) as temporary:
    figure.savefig(temporary, dpi=120)
