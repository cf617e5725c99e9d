"""Measures a trained nano model and writes its card.

    python -m experiments.nano_card --model=out/olmoe-nano/model --corpus=DIR [--replaces=MODEL]

About ten minutes on two cores. Writes card.json, every number, and README.md into the model's
folder. Reads the training and calibration splits of the corpus.
"""

import json

from absl import app, flags

from configs.nano import NANO
from configs.prompts import BREADTH, REPLAY
import moejax
from moejax import data, training
from moejax.report.files import atomic_path
from moejax.report.record import write_json
from moejax.training import card

_MODEL = flags.DEFINE_string("model", None, "Model folder or name.", required=True)
_REPLACES = flags.DEFINE_string("replaces", None, "Model whose card goes into the history.")
_CORPUS = flags.DEFINE_string("corpus", None, "Folder with manifest.json.", required=True)


def main(_):
  try:
    run()
  except (ValueError, OSError) as error:
    raise SystemExit(f"nano_card: {error}") from None


def run():
  """Measures and writes."""
  model = moejax.load(_MODEL.value)
  nano = NANO[model.family]
  documents = data.read_corpus(_CORPUS.value, "train", nano.languages)
  stream = training.make_stream(
    documents,
    model.tokenizer,
    model.config.eos_ids[0],
    nano.recipe.length,
    nano.recipe.seed,
    nano.mixture,
  )
  texts = ([prompt.text for prompt in prompts] for prompts in (REPLAY, BREADTH))
  measured = card.measure(model, _CORPUS.value, stream, *texts) | dict(name=nano.name)
  if _REPLACES.value:
    previous = moejax.load(_REPLACES.value).directory / "card.json"
    measured["history"] = card.history(json.loads(previous.read_text(encoding="utf-8")))
  write_json(model.directory / "card.json", measured)
  with atomic_path(model.directory / "README.md") as path:
    path.write_text(card.render(measured), encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
