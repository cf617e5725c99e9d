"""A change at one layer and token of a forked run, and what it may reach."""

import jax.numpy as jnp
import numpy as np

from moejax.models.execution import DEFAULT
from tests.models import tiny
from tests.models.tiny import BATCH, draw_tokens, FORK, LENGTH, native_fork
from tests.oracles import assert_same_bits, bits

TOKENS = draw_tokens(BATCH)
TIME = TOKENS.shape[1] - FORK
AT = 3  # the token of a fork that is changed


def empty(model, rows=1, mode=DEFAULT):
  return model.module.init_state(rows, LENGTH, mode)


def layer_of(model):
  """The first layer whose router decides; in three families others follow."""
  return model.top_k_layers[0]


def at_one(model, value, rest):
  """`value` at layer `layer_of`, token AT of both rows, `rest` everywhere else."""
  shape = (model.config.num_layers, 2, TIME, *np.shape(value))
  out = np.broadcast_to(np.asarray(rest, np.asarray(value).dtype), shape).copy()
  out[layer_of(model), :, AT] = value
  return jnp.asarray(out)


def out_of_reach(model, x):
  """The values of [L, B, T, ...] that a change at `at_one` cannot reach."""
  layer = layer_of(model)
  after = x[layer + 1 :, :, :AT]
  return np.concatenate([part.ravel() for part in (x[:layer], np.delete(x[layer], AT, 1), after)])


def assert_changes_only_what_follows(model, result, native=None):
  """Against another run of the same tokens, the native one by default."""
  native = native or native_fork(model)
  for name in ("post_block", "ids", "terms"):
    kept, expected = (out_of_reach(model, r.trace[name]) for r in (result, native))
    assert_same_bits(kept, expected)
  assert_same_bits(result.logits[:, :AT], native.logits[:, :AT])
  for row in range(2):
    here = (layer_of(model), row, AT)
    assert (bits(result.trace["post_block"][here]) != bits(native.trace["post_block"][here])).any()
    assert (bits(result.logits[row, AT]) != bits(native.logits[row, AT])).any()
  # The layers up to the changed one keep their state; a cache is written before experts are summed.
  new, old = tiny.contents(result), tiny.contents(native)
  kept = [f"{row}.layers.{i}." for row in range(2) for i in range(layer_of(model) + 1)]
  for name in new:
    if name.startswith(tuple(kept)):
      assert_same_bits(new[name], old[name])


def native_rows(model):
  """The two rows of a fork, each alone in a smaller state and without any execution."""
  parts = [tiny.run(model, TOKENS[i : i + 1], tiny.CHUNK) for i in range(2)]
  return [part.tokens(None, start=FORK) for part in parts]
