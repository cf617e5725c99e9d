"""The references read the nano models whole, and compute what we do in float32.

That is transformers, and for DeepSeek-MoE, which it does not have, the fixtures' own torch code.
"""

import json

import numpy as np
import pytest

from configs.prompts import REPLAY
import moejax
from moejax import checkpoints, data, Mode
from moejax.inference import forward, generate

# Warnings of the foreign library are its own.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

FLOAT32 = Mode("fast", "float32")
TIME, NEW = 128, 24


def unlike(model, runner) -> dict[str, list[str]]:
  """Tensors of its checkpoint that the reference misses, does not expect or has in other shapes."""
  from tests.references import native, weights

  if model.family != "deepseek":
    return native.load_report(model.directory)
  stored = {name: tuple(tensor.shape) for name, tensor in runner.weights.items()}
  expected = weights.shapes(json.loads((model.directory / "config.json").read_text()))
  return dict(
    missing=sorted(expected.keys() - stored),
    unexpected=sorted(stored.keys() - expected),
    mismatched=[n for n in expected.keys() & stored if expected[n] != stored[n]],
  )


@pytest.mark.parametrize("name", checkpoints.shipped())
def test_the_reference_reads_and_computes_the_same_model(name):
  from tests.references import live, traces

  model = moejax.load(name, "float32")
  runner = live.reference(model.family).Runner(model.directory)
  assert unlike(model, runner) == dict(missing=[], unexpected=[], mismatched=[])
  passages = data.passages("calibration")
  tokens = data.windows(passages, model.tokenizer, TIME, num=4).tokens
  ours, _, _ = forward(model, tokens, model.init_state(4, TIME, FLOAT32), mode=FLOAT32)
  theirs = traces.logits_and_routes(runner, tokens)["logits"]
  np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-3)
  prompts = [model.tokenizer.encode(prompt.text) for prompt in REPLAY[:10]]
  texts = generate(model, prompts, NEW, mode=FLOAT32).tokens
  expected = [traces.greedy(runner, np.array([prompt]), NEW)[0] for prompt in prompts]
  np.testing.assert_array_equal(texts, expected)
