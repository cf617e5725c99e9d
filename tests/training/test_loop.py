"""The loop: killed at any moment it goes on as if nothing had been; misfits are refused."""

import gc
import json
import pathlib
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest

from moejax.checkpoints import Tokenizer
from moejax.training import export, loop, Recipe, Run, TokenStream, train
from tests.models import tiny
from tests.training.test_stream import tokenizer

RECIPE = Recipe(tokens=8 * 2 * 60, batch=2, length=8, peak_rate=0.01, warmup_steps=5)


def make_run(directory, **changes):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 61, 3000).astype(np.int32)
  parts = dict(
    directory=pathlib.Path(directory),
    config=tiny.tiny("olmoe").config,
    recipe=RECIPE,
    stream=TokenStream(tokens, RECIPE.length, RECIPE.seed),
    tokenizer=tokenizer(),
    save_every=20,
  )
  return Run(**(parts | changes))


def finish(run, **options):
  """(last progress, last parameters on the host)."""
  for progress, params in train(run, **options):
    last = progress, params
  return last[0], jax.device_get(last[1])


def same(a, b):
  leaves = lambda tree: [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
  return leaves(a) == leaves(b)


# As a program: trains, and dies without warning after the step of its second argument.
def die(directory, at):
  import os
  import signal

  run = make_run(directory)
  original = run.stream.batch

  class Stream(TokenStream):
    def batch(self, first, size):
      if first == at * RECIPE.batch:
        os.kill(os.getpid(), signal.SIGKILL)
      return original(first, size)

  stream = Stream(run.stream.tokens, run.stream.length, run.stream.seed)
  finish(make_run(directory, stream=stream))


if __name__ == "__main__":
  die(sys.argv[1], int(sys.argv[2]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run."""
  run = make_run(tmp_path_factory.mktemp("whole"))
  return run, *finish(run)


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_run(whole, tmp_path):
  _, _, expected = whole
  command = [sys.executable, "-m", "tests.training.test_loop", str(tmp_path), "51"]
  killed = subprocess.run(command, capture_output=True, text=True)
  assert killed.returncode == -9, killed.stderr
  rows = loop.read_log(tmp_path / "log.jsonl")
  assert [row["step"] for row in rows] == [20, 40]
  # A kill in the middle of a row, and one of a step whose state was not saved.
  with open(tmp_path / "log.jsonl", "a") as file:
    file.write(json.dumps(rows[-1] | {"step": 50}) + '\n{"step": 5')
  progress, params = finish(make_run(tmp_path))
  assert progress.step == RECIPE.steps == 60
  assert same(params, expected)
  assert [row["step"] for row in loop.read_log(tmp_path / "log.jsonl")] == [20, 40, 60]
  ((again, finished),) = train(make_run(tmp_path))  # nothing is left to do
  assert again == progress and same(finished, expected)


def test_a_consumer_may_stop_between_states(whole, tmp_path):
  run = make_run(tmp_path, save_every=60)
  steps = train(run)
  progress, _ = next(steps)
  steps.close()
  assert progress.step == 20 and (tmp_path / "states" / "20").is_dir()
  assert same(finish(run)[1], whole[2])


def test_a_model_is_written_and_training_goes_on_from_it(whole, tmp_path):
  run, _, params = whole
  export.write_model(run, params, loop.Progress(40, 3.5, 60.0))
  start, step = export.read_start(run.directory / "model", run)
  assert step == 40
  rounded = jax.tree.map(lambda x: x.astype(np.float32), export.round_params(run, params))
  assert same(start, rounded)
  progress, after = finish(make_run(tmp_path), start=start, first_step=step)
  assert progress.step == 60 and not same(start, after)
  assert [row["step"] for row in loop.read_log(tmp_path / "log.jsonl")] == [60]
  export.draw_training(tmp_path / "training.png", loop.read_log(tmp_path / "log.jsonl"))
  assert (tmp_path / "training.png").read_bytes()[:4] == b"\x89PNG"


def test_a_folder_of_another_run_is_refused(whole):
  directory = whole[0].directory
  other = Recipe(**(vars(RECIPE) | {"batch": 4}))
  with pytest.raises(ValueError, match=r"another recipe: batch is 2, expected 4\.$"):
    next(train(make_run(directory, recipe=other)))
  with pytest.raises(ValueError, match=r"another config: family is 'olmoe', expected 'qwen3_moe'"):
    next(train(make_run(directory, config=tiny.tiny("qwen3_moe").config)))
  backend = tokenizer().backend
  renamed = Tokenizer({"tokenizer.json": b"{}"}, None, backend)
  with pytest.raises(ValueError, match=r"holds a run with another tokenizer\.$"):
    next(train(make_run(directory, tokenizer=renamed)))
  stream = TokenStream(np.zeros(3000, np.int32), RECIPE.length, 0)
  with pytest.raises(ValueError, match=r"holds a run with another text\.$"):
    next(train(make_run(directory, stream=stream)))


def test_a_start_of_another_model_is_refused(whole, tmp_path):
  run, progress, params = whole
  export.write_model(run, params, progress)
  model = run.directory / "model"
  other = make_run(tmp_path, config=tiny.tiny("qwen3_moe").config)
  with pytest.raises(ValueError, match=r"is a model of another config\.$"):
    export.read_start(model, other)
  stream = TokenStream(np.zeros(3000, np.int32), RECIPE.length, 0)
  with pytest.raises(ValueError, match=r"was trained with another text\.$"):
    export.read_start(model, make_run(tmp_path, stream=stream))
  with pytest.raises(FileNotFoundError, match=r"expected training\.json"):
    export.read_start(tmp_path, run)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_leaves_the_state_before(whole, tmp_path):
  """A limit on the size of files stands for it; threads of orbax that nobody waits for fail too."""
  run = make_run(tmp_path)
  steps = train(run)
  next(steps)
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
  try:
    with pytest.raises(OSError, match=r"state of step 40 was not written, that of step 20 is"):
      next(steps)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    gc.collect()
  assert same(finish(make_run(tmp_path))[1], whole[2])


def test_a_loss_that_is_not_a_number_is_named(whole, tmp_path):
  start = jax.tree.map(lambda x: x * np.float32(np.nan), whole[2])
  with pytest.raises(FloatingPointError, match=r"step 20: the loss is nan; try a lower peak_rate"):
    next(train(make_run(tmp_path), start=start))
