"""Layer-static schedules: one order per MoE layer and request, reused at every position.

Section 2.4.5 of the reduction paper. A schedule is a function of its numbers alone: Threefry-2x32
(`jax.random`, partitionable form) keyed by seed, request and layer, whose words are ranked.
"""

import jax
import numpy as np

from moejax.combine.orders import check_terms

GENERATOR = "threefry2x32, partitionable; argsort of uint32 words, stable"


def schedule(seed: int, request: int, num_layers: int, num_terms: int) -> np.ndarray:
  """Orders for every layer of one request: int32 [num_layers, num_terms].

  The order of a layer does not depend on how many layers are asked for.
  """
  check_terms("schedule", num_terms)
  with jax.threefry_partitionable(True):
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(
      np.arange(num_layers, dtype=np.uint32)
    )
    words = jax.vmap(lambda key: jax.random.bits(key, (num_terms,), np.uint32))(keys)
  return np.argsort(np.asarray(words), axis=1, kind="stable").astype(np.int32)
