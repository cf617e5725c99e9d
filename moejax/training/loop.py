"""The training loop: resumable at any moment, its log as JSON lines.

A run is a folder:

    run.json      what is being trained, on what; a resumed run must match it
    log.jsonl     a row every `LOG_EVERY` steps
    states/       orbax: parameters and optimiser, every `SAVE_EVERY` steps
"""

from collections.abc import Iterator
import dataclasses
import json
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints import restore_latest, save_training, Tokenizer
from moejax.models.config import Config
from moejax.report.files import atomic_path
from moejax.report.record import claim
from moejax.training import step as training_step
from moejax.training.initial import initial_params
from moejax.training.recipe import Recipe
from moejax.training.stream import TokenStream

LOG_EVERY = 20
SAVE_EVERY = 200


@dataclasses.dataclass(frozen=True)
class Progress:
  """Where a run stands.

  Attributes:
    step: steps done.
    nll: mean loss of the last logged steps, nats per token; NaN before the first row.
    seconds: spent so far, over all sittings, of the steps that are kept.
  """

  step: int
  nll: float
  seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """A training run.

  Attributes:
    directory: see the module.
    config: of the model.
    recipe: how it is trained.
    stream: what it reads.
    tokenizer: that made the stream.
    save_every: steps between saved states, a multiple of `LOG_EVERY`.
  """

  directory: pathlib.Path
  config: Config
  recipe: Recipe
  stream: TokenStream
  tokenizer: Tokenizer
  save_every: int = SAVE_EVERY

  def identity(self) -> dict[str, Any]:
    """What must be the same when the run goes on."""
    return dict(
      config=json.loads(json.dumps(dataclasses.asdict(self.config))),
      recipe=dataclasses.asdict(self.recipe),
      tokenizer_sha256=self.tokenizer.sha256,
      text_sha256=self.stream.sha256,
    )

  def claim(self) -> None:
    """Writes run.json, or compares with it.

    Raises:
      ValueError: the folder holds a run with another config, recipe, tokenizer or text.
    """
    claim(self.directory / "run.json", self.identity())


def train(
  run: Run, start: dict[str, Any] | None = None, first_step: int = 0
) -> Iterator[tuple[Progress, dict[str, Any]]]:
  """Trains, from the last saved state where there is one; yields after every logged step.

  Args:
    run: the run.
    start: float32 parameters to start from instead of random ones.
    first_step: the step that the schedule and the data start at; the optimiser starts anew there.

  Yields:
    (progress, float32 parameters); of a finished run once. A consumer may stop at any time; when it
    closes the iterator the state is saved.

  Raises:
    ValueError: the folder holds another run.
    OSError: a state could not be written; the one before it is still there.
  """
  run.claim()
  recipe = run.recipe
  if start is None:
    params = initial_params(run.config, _counts(run), recipe.seed)
  else:
    params = jax.tree.map(jnp.array, start)  # a copy: steps give their arguments away
  opt_state = recipe.optimizer(first_step).init(training_step.split(params)[0]["params"])
  tree = {"params": params["params"], "optimizer": opt_state}
  restored = restore_latest(run.directory / "states", tree)
  step, tree = restored or (first_step, tree)
  log = _Log(run.directory / "log.jsonl", step)
  params, opt_state = {"params": tree["params"]}, tree["optimizer"]
  if step >= recipe.steps:
    yield log.last, params
  while step < recipe.steps:
    params, opt_state, metrics = training_step.step(
      params,
      opt_state,
      jnp.asarray(run.stream.batch(step * recipe.batch, recipe.batch)),
      jnp.int32(first_step),
      config=run.config,
      recipe=recipe,
      phase=recipe.phase(step),
    )
    step += 1
    log.add(metrics)
    if step % LOG_EVERY and step < recipe.steps:
      continue
    due = step % run.save_every == 0 or step == recipe.steps
    progress = log.write(step, step * recipe.batch * recipe.length)
    if due:
      _save(run, step, params, opt_state)
    try:
      yield progress, params
    except GeneratorExit:
      if not due:
        _save(run, step, params, opt_state)
      raise


def _save(run: Run, step: int, params, opt_state) -> None:
  save_training(
    run.directory / "states", step, {"params": params["params"], "optimizer": opt_state}
  )


def _counts(run: Run) -> np.ndarray:
  return np.bincount(run.stream.tokens, minlength=run.config.vocab_size)


class _Log:
  """Rows of log.jsonl, none of them of a step beyond the state the run goes on from."""

  def __init__(self, path: pathlib.Path, step: int):
    self._path, self._metrics, self._start = path, [], time.monotonic()
    kept = [row for row in read_log(path) if row["step"] <= step]
    seconds = sum(row["seconds"] for row in kept)
    self.last = Progress(step, kept[-1]["nll"] if kept else float("nan"), seconds)
    with atomic_path(path) as temporary:
      temporary.write_text("".join(map(_line, kept)), encoding="utf-8")

  def add(self, metrics: dict[str, jax.Array]) -> None:
    self._metrics.append(metrics)

  def write(self, step: int, tokens: int) -> Progress:
    metrics = jax.device_get(self._metrics)
    now = time.monotonic()
    load = np.mean([m["load"] for m in metrics], axis=0)
    row = dict(
      step=step,
      tokens=tokens,
      nll=float(np.mean([m["nll"] for m in metrics])),
      aux=float(np.mean([m["aux"] for m in metrics])),
      max_load=[round(float(x), 3) for x in load.max(axis=1)],
      min_load=[round(float(x), 3) for x in load.min(axis=1)],
      seconds=round(now - self._start, 3),
    )
    if not np.isfinite(row["nll"]):
      raise FloatingPointError(f"step {step}: the loss is {row['nll']}; try a lower peak_rate.")
    with open(self._path, "a", encoding="utf-8") as file:
      file.write(_line(row))
      file.flush()
      os.fsync(file.fileno())
    self._metrics, self._start = [], now
    self.last = Progress(step, row["nll"], self.last.seconds + row["seconds"])
    return self.last


def _line(row: dict[str, Any]) -> str:
  return json.dumps(row) + "\n"


def read_log(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The whole rows of a log; a last line cut short by a kill is not one."""
  path = pathlib.Path(path)
  if not path.is_file():
    return []
  lines = path.read_text(encoding="utf-8").split("\n")
  return [json.loads(line) for line in lines[:-1]]
