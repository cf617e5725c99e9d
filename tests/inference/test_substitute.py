"""Differences of persistent states carry one endpoint into the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import inference
from moejax.models import export
from moejax.models.sparse_state import CompressorState, SparseCache
from moejax.models.state import PersistentState
from tests.oracles import assert_same_bits


def state_of(seed, position=3):
  """A DeepSeek-V4 layer's state: BF16 rows, float32 projections, logits still at -inf."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  scores = jnp.full((1, 8, 6), -jnp.inf).at[:, :3].set(draw(1, 3, 6))
  compressor = CompressorState(draw(1, 2, 6).astype(jnp.bfloat16), draw(1, 8, 6), scores)
  cache = SparseCache(draw(1, 8, 6).astype(jnp.bfloat16), compressor, None, ratio=8)
  return PersistentState(jnp.full(1, position, jnp.int32), (cache,), 16)


@pytest.mark.parametrize("kind", ["float64", "xor"])
def test_a_difference_turns_one_state_into_the_other(kind):
  native, branch = state_of(0), state_of(1)
  delta = inference.difference(branch, native, kind)
  result = inference.substitute(native, delta)
  assert inference.num_differing(result, branch) == 0
  assert inference.num_differing(native, branch) > 100
  for name, value in export(branch).items():
    assert_same_bits(export(result)[name], value)


def test_equal_infinities_have_a_difference_that_changes_nothing():
  native = state_of(0)
  delta = inference.difference(native, native)
  scores = delta.layers[0].compressor.scores
  assert (scores == 0).all()
  assert np.signbit(scores).all()
  assert inference.num_differing(inference.substitute(native, delta), native) == 0


def test_bits_carry_what_float64_cannot():
  native = state_of(0)
  values = (
    native.layers[0].compressor.values.at[0, 0, :3].set(jnp.asarray([-0.0, jnp.nan, jnp.inf]))
  )
  compressor = native.layers[0].compressor.replace(values=values)
  branch = native.replace(layers=(native.layers[0].replace(compressor=compressor),))
  by_bits = inference.difference(branch, native, "xor")
  assert inference.num_differing(jax.jit(inference.substitute)(native, by_bits), branch) == 0
  by_value = inference.substitute(native, inference.difference(branch, native))
  assert inference.num_differing(by_value, branch) >= 1  # -0 comes back as +0


def test_states_that_do_not_belong_together_are_refused():
  native = state_of(0)
  with pytest.raises(ValueError, match="different positions"):
    inference.difference(state_of(1, position=4), native)
  with pytest.raises(ValueError, match="kind must be"):
    inference.difference(native, native, "sum")
  other = native.replace(position=jnp.zeros(2, jnp.int32))
  with pytest.raises(ValueError, match="different configs or batches"):
    inference.substitute(native, inference.difference(other, other))
