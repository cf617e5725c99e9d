"""Values that XLA stores instead of computing them again for every reader.

XLA:CPU drops optimization barriers before it fuses. A residual stream held by one is computed anew,
from the embedding on, by every fusion that reads it: time grows with the square of depth.
"""

import jax
from jax import lax

from moejax.numerics.library import native


@jax.custom_jvp
def materialize(x: jax.Array) -> jax.Array:
  """x itself, whatever its shape and dtype, written to memory: no fusion crosses it.

  A custom call that does nothing. Without the kernel library it is an optimization barrier, which
  stops algebra but not fusion.
  """
  if not native():
    return lax.optimization_barrier(x)
  call = jax.ffi.ffi_call(
    "moejax_materialize",
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    vmap_method="expand_dims",
    input_output_aliases={0: 0},
  )
  return call(x)


@materialize.defjvp
def _(primals, tangents):
  return materialize(*primals), tangents[0]
