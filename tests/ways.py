"""A function called every way it can be: NumPy, eager XLA, jit, vmap and scan."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from tests.oracles import assert_same_bits


def runs(function):
  """The function under NumPy, eager XLA, jit, vmap over leading axes and scan over them."""

  def in_scan(*operands):
    return lax.scan(lambda c, rows: (c, function(*rows)), jnp.int32(0), operands)[1]

  return {
    "numpy": function,
    "eager": lambda *operands: function(*map(jnp.asarray, operands)),
    "jit": jax.jit(function),
    "vmap": jax.jit(jax.vmap(function)),
    "scan": jax.jit(in_scan),
  }


def check_runs(function, operands, expected, names=("numpy", "eager", "jit", "vmap", "scan")):
  for name in names:
    assert_same_bits(runs(function)[name](*operands), expected)


def normal_rows(seed, shape, binades=20):
  """float32 with the scale of each row drawn from 2^-binades .. 2^binades."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  return np.ldexp(x, rng.integers(-binades, binades, (*shape[:-1], 1)))
