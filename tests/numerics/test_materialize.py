"""`materialize` changes no bit, has the gradient of the identity, and keeps fusions apart."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models import config_from_hf, family_of
from moejax.models.execution import DEFAULT
from moejax.numerics import materialize
from tests.models import tiny
from tests.oracles import assert_same_bits

WORDS = np.array(
  [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00001],
  np.uint32,
)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32, jnp.bfloat16, np.bool_])
def test_every_bit_stays(dtype):
  words = WORDS.view(np.uint16) if dtype == jnp.bfloat16 else WORDS
  x = (words != 0) if dtype == np.bool_ else words.view(dtype)
  for call in (materialize, jax.jit(materialize), jax.jit(lambda x: materialize(x.reshape(3, -1)))):
    out = np.asarray(call(jnp.asarray(x))).reshape(-1)
    assert out.dtype == x.dtype and out.tobytes() == x.tobytes()


def test_shapes_vmap_and_scan():
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  assert_same_bits(jax.vmap(materialize)(x), x)
  assert_same_bits(jax.vmap(lambda a, b: a + materialize(b), (0, None))(x, x[0]), x + x[0])
  step = lambda total, row: (materialize(total + row), materialize(row))
  total, same = jax.jit(lambda x: jax.lax.scan(step, jnp.zeros(4), x))(x)
  assert_same_bits(same, x)
  assert_same_bits(total, x[0] + x[1] + x[2])
  assert materialize(jnp.float32(7)).shape == () and materialize(x[:0]).shape == (0, 4)


def test_an_operand_that_is_read_again_is_not_overwritten():
  x = jnp.arange(5, dtype=jnp.float32)
  kept, changed = jax.jit(lambda x: (x, materialize(x).at[2].set(9)))(x)
  assert_same_bits(kept, x)
  assert changed.tolist() == [0, 1, 9, 3, 4]


def test_the_gradient_is_that_of_the_identity():
  value, grad = jax.value_and_grad(lambda x: (materialize(x * x) ** 2).sum())(np.float32([1, 2, 3]))
  assert value == 98 and grad.tolist() == [4, 32, 108]


def largest_fusion(layers: int) -> int:
  """Operands of the fusion with most of them, in the program of a tiny OLMoE."""
  config = config_from_hf(tiny.FIELDS["olmoe"] | dict(num_hidden_layers=layers))
  module, params = family_of(config)(config), tiny.draw(config)
  state = module.init_state(2, 8, DEFAULT)
  program = jax.jit(lambda *args: module.apply(*args)[0])
  text = program.lower(params, jnp.zeros((2, 8), jnp.int32), state).compile().as_text()
  return max(operands.count("%") for operands in re.findall(r" fusion\(([^)]*)\)", text))


def test_no_fusion_goes_back_through_the_layers():
  """The residual stream of layer n is not computed from all layers before it."""
  assert largest_fusion(5) <= largest_fusion(3) < 10
