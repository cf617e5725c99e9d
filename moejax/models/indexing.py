"""Gathers and integer division without the sign handling of jnp, which is most of their program.

Indices are within bounds and integers are not negative.
"""

import jax
from jax import lax
import jax.numpy as jnp


def take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
  """`jnp.take_along_axis` for indices within bounds."""
  return jnp.take_along_axis(x, index, axis=axis, mode="promise_in_bounds")


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of x [B, N, ...] by int32 [B, *n] → [B, *n, ...]."""
  flat = index.reshape(index.shape[0], -1, *[1] * (x.ndim - 2))
  return take(x, flat, 1).reshape(*index.shape, *x.shape[2:])


def quotient(x: jax.Array, divisor: int) -> jax.Array:
  """x // divisor, x int32 and not negative."""
  return lax.div(x, jnp.full_like(x, divisor))


def remainder(x: jax.Array, divisor: int) -> jax.Array:
  """x % divisor, x int32 and not negative."""
  return lax.rem(x, jnp.full_like(x, divisor))
