"""Every family in float32 against what transformers computed on its tiny checkpoints.

The recorded case of a family named "base" runs with two programs: all tokens at once, and one token
at a time. Of the others each runs with one, which reads the prompt's number of tokens: all of them
chunk by chunk, and single ones padded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import checkpoints
from moejax.models import Mode, Taps
from tests.references import weights
from tests.references.cases import CASES, reference

MODE, TAPS = Mode("fast", "float32"), Taps.routes(post_block=True)


class Runner:
  """A case's model, and its compiled calls by their number of tokens."""

  def __init__(self, case, directory):
    batch, length = weights.tokens(case).shape
    model = checkpoints.load(weights.write_checkpoint(case, directory), "float32")
    self._apply = jax.jit(functools.partial(model.apply, mode=MODE, taps=TAPS))
    self._params = model.params
    self.empty = model.init_state(batch, length + case.new, MODE)

  def __call__(self, tokens, state, width):
    """Reads tokens [B, T] in chunks of a width, the last one padded.

    Returns:
      (logits [B, T, V], trace with [L, B, T], state).
    """
    parts = []
    for at in range(0, tokens.shape[1], width):
      piece = tokens[:, at : at + width]
      size = piece.shape[1]
      padded = np.pad(piece, ((0, 0), (0, width - size)), constant_values=-1)
      logits, state, trace = self._apply(self._params, jnp.asarray(padded), state)
      # Logits as a trace of one layer.
      trace = dict(trace, logits=logits[None])
      parts.append({name: np.asarray(value)[:, :, :size] for name, value in trace.items()})
    trace = {name: np.concatenate([part[name] for part in parts], axis=2) for name in parts[0]}
    return trace.pop("logits")[0], trace, state


def negative_log_likelihood(logits, tokens):
  """float64 [B, T-1] of tokens[:, 1:]."""
  logits = logits[:, :-1].astype(np.float64)
  logits -= logits.max(axis=-1, keepdims=True)
  scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  return -np.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]


def assert_close(actual, expected, atol, name=""):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)


def assert_trace_is(trace, recorded):
  """Routes, what they were decided by, and the state after the last layer."""
  own = {name: trace[name][recorded["moe_layers"]] for name in trace if name != "post_block"}
  np.testing.assert_array_equal(own["ties"], recorded["ties"])
  clear = ~recorded["ties"]
  np.testing.assert_array_equal(own["ids"][clear], recorded["ids"][clear])
  assert_close(own["weights"][clear], recorded["weights"][clear], 1e-5, "weights")
  for name in ("router_logits", "margins"):
    assert_close(own[name], recorded[name], 1e-4, name)
  slots = np.sort(own["slots"], axis=-1)
  np.testing.assert_array_equal(slots, np.broadcast_to(np.arange(slots.shape[-1]), slots.shape))
  assert_close(trace["post_block"][-1], recorded["post_block"], 1e-3, "post_block")


@pytest.mark.parametrize("name", CASES)
def test_a_case_computes_what_was_recorded(name, tmp_path):
  case, recorded = CASES[name], reference(name)
  run, tokens = Runner(case, tmp_path), recorded["tokens"]
  length = tokens.shape[1]
  width, step = (length, 1) if name.endswith("_base") else (case.prompt, case.prompt)

  logits, trace, _ = run(tokens, run.empty, width)
  assert_close(logits, recorded["logits"], 1e-4)
  # 20 units in the last place of a loss of 8: fast products sum as the processor's width has it.
  assert_close(negative_log_likelihood(logits, tokens), recorded["nll"], 2e-5)
  assert_trace_is(trace, recorded)

  prompt_logits, _, prompted = run(tokens[:, : case.prompt], run.empty, width)
  state, decoded = prompted, []
  for t in range(case.prompt, length):
    logits, _, state = run(tokens[:, t : t + 1], state, step)
    decoded.append(logits)
  assert_close(np.concatenate(decoded, axis=1), recorded["decode_logits"], 1e-4)
  np.testing.assert_array_equal(state.position, length)

  logits, state, greedy = prompt_logits, prompted, []
  for _ in range(case.new):
    greedy.append(logits[:, -1:].argmax(axis=-1).astype(np.int32))
    logits, _, state = run(greedy[-1], state, step)
  np.testing.assert_array_equal(np.concatenate(greedy, axis=1), recorded["greedy_ids"])
