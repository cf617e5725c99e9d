"""One source for NumPy and XLA: the few operations that the two spell, or treat, differently.

Functions of this package that claim the same bits under NumPy, eager XLA and jitted XLA are written
once, over `backend(x)`. XLA rewrites floating-point code more freely than IEEE allows, with
fast-math off (recorded in `tests/numerics/test_xla.py`), so three devices are needed:

* `fence(p)` between an inexact product and an add: stops the contraction to a fused multiply-add.
* `hold(s)` between `x + c` and `- c`, and before `1/sqrt`: stops the algebraic simplifier.
* `divide(x, s)` where s is a constant or is broadcast: XLA would multiply by the reciprocal.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_NAN = np.float32(np.nan)


class NumpyBackend:
  """NumPy neither contracts nor simplifies: fences are the identity."""

  xp = np

  @staticmethod
  def fence(p):
    return p

  @staticmethod
  def hold(s):
    return s

  @staticmethod
  def divide(x, s):
    """x / s; s broadcasts to x."""
    return x / s

  @staticmethod
  def rint(x):
    return np.rint(x)

  @staticmethod
  def bits(x):
    """float32 → uint32 of the same bits."""
    return np.asarray(x).view(np.uint32)

  @staticmethod
  def from_bits(u):
    """uint32 → float32 of the same bits."""
    return np.asarray(u).view(np.float32)


class XlaBackend:
  """XLA, eager, traced or constant-folded."""

  xp = jnp

  @staticmethod
  def fence(p):
    # A select between product and add stops contraction; optimization_barrier does not.
    return jnp.where(p != p, _NAN, p)

  @staticmethod
  def hold(s):
    return lax.optimization_barrier(s)

  @staticmethod
  def divide(x, s):
    # Held at x's shape.  The select ties s to x: vmap would put the batch axis of an s that is not
    # batched after the barrier, as a broadcast.
    s = jnp.broadcast_to(s, x.shape)
    return x / lax.optimization_barrier(jnp.where(x == x, s, x))

  @staticmethod
  def rint(x):
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)

  @staticmethod
  def bits(x):
    return lax.bitcast_convert_type(x, jnp.uint32)

  @staticmethod
  def from_bits(u):
    return lax.bitcast_convert_type(u, jnp.float32)


def backend(*arrays):
  """XlaBackend if any operand is a jax.Array (a tracer is one), else NumpyBackend."""
  return XlaBackend if any(isinstance(a, jax.Array) for a in arrays) else NumpyBackend


def require_float32(name: str, x) -> None:
  """Refuses anything but a float32 array: a silent cast would be a rounding nobody asked for."""
  dtype = getattr(x, "dtype", type(x).__name__)
  if dtype != np.float32:
    raise TypeError(f"{name}: expected a float32 array, got {dtype}.")
