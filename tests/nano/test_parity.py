"""transformers reads the nano models whole, and computes what we do in float32."""

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


def foreign(model):
  """Its logits of tokens [B, T], and its greedy continuation of a prompt."""
  import torch

  from tests.references import native

  runner = native.Runner(model.directory)

  def logits(tokens):
    with torch.inference_mode():
      return runner.step(torch.from_numpy(tokens).long(), runner.new_cache()).logits.numpy()

  def greedy(prompt):
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
      out = runner.model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()

  return logits, greedy


@pytest.mark.parametrize("name", checkpoints.shipped())
def test_transformers_reads_and_computes_the_same_model(name):
  from tests.references import native

  model = moejax.load(name, "float32")
  assert native.load_report(model.directory) == dict(missing=[], unexpected=[], mismatched=[])
  logits, greedy = foreign(model)
  passages = data.passages("calibration")
  tokens = data.windows(passages, model.tokenizer, TIME, num=4).tokens
  ours, _, _ = forward(model, tokens, model.init_state(4, TIME, FLOAT32), mode=FLOAT32)
  np.testing.assert_allclose(np.asarray(ours), logits(tokens), rtol=0, atol=1e-3)
  prompts = [model.tokenizer.encode(prompt.text) for prompt in REPLAY[:10]]
  texts = generate(model, prompts, NEW, mode=FLOAT32).tokens
  assert [row.tolist() for row in texts] == [greedy(prompt) for prompt in prompts]
