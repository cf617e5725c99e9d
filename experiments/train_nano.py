"""Trains a nano model on a corpus, on CPU; stopped at any moment, it goes on when run again.

    python -m experiments.train_nano --family=olmoe --corpus=DIR --out=out/olmoe-nano --minutes=60

DIR has manifest.json (moejax/data/corpus.py says how it looks) and tokenizer/tokenizer.json. Writes
log.jsonl, the state every few minutes, and at the end of each sitting the picture of losses and
loads and the model so far in OUT/model, which `moejax.load` and transformers read.
"""

import contextlib
import pathlib
import time

from absl import app, flags, logging
from tqdm import tqdm

from configs.nano import NANO
from moejax import checkpoints, data, training
from moejax.models.families import config_from_hf
from moejax.training import export, loop

_FAMILY = flags.DEFINE_enum("family", None, sorted(NANO), "Of the model.", required=True)
_CORPUS = flags.DEFINE_string("corpus", None, "Folder with manifest.json.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder; none: tokenizer/ of the corpus.")
_OUT = flags.DEFINE_string("out", None, "Folder of the run.", required=True)
_MINUTES = flags.DEFINE_float("minutes", 600.0, "Of this sitting, at most.", lower_bound=0.0)
_FROM = flags.DEFINE_string("continue_from", None, "Model folder that a new run starts from.")


def main(_):
  try:
    run()
  except (ValueError, OSError, FloatingPointError) as error:
    raise SystemExit(f"train_nano: {error}") from None


def run():
  """Reads the text, trains, writes the model."""
  logging.set_verbosity(logging.WARNING)  # orbax tells of every save
  stop_at = time.monotonic() + 60 * _MINUTES.value
  nano, corpus = NANO[_FAMILY.value], pathlib.Path(_CORPUS.value)
  tokenizer = checkpoints.Tokenizer.from_directory(_TOKENIZER.value or corpus / "tokenizer")
  documents = data.read_corpus(corpus, "train", nano.languages)
  recipe, config = nano.recipe, config_from_hf(dict(nano.fields))
  stream = training.make_stream(
    documents, tokenizer, config.eos_ids[0], recipe.length, recipe.seed, nano.mixture
  )
  this = training.Run(pathlib.Path(_OUT.value), config, recipe, stream, tokenizer)
  start, first_step = None, 0
  if _FROM.value:
    start, first_step = export.read_start(_FROM.value, this)
  bar, per_step = None, recipe.batch * recipe.length
  with contextlib.closing(training.train(this, start, first_step)) as steps:
    for progress, params in steps:
      if bar is None:  # a resumed run starts here
        done = progress.step * per_step
        bar = tqdm(total=recipe.steps * per_step, initial=done, unit="tok", unit_scale=True)
      bar.update(progress.step * per_step - bar.n)
      bar.set_postfix(nll=f"{progress.nll:.3f}")
      if time.monotonic() > stop_at or progress.step == recipe.steps:
        export.write_model(this, params, progress)
        break
    bar.close()
  export.draw_training(this.directory / "training.png", loop.read_log(this.directory / "log.jsonl"))


if __name__ == "__main__":
  app.run(main)
