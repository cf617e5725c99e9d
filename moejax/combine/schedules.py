"""Schedules of orders: one per MoE layer and request, or one per position too.

Layer-static schedules, reused at every position, are section 2.4.5 of the reduction paper. A
schedule is a function of its numbers alone: Threefry-2x32 (`jax.random`, partitionable form) keyed
by seed, request and layer, and by position where it is token-dynamic, whose words are ranked.
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
    return _ranked_words(_layer_keys(seed, request, num_layers), num_terms)


def dynamic_schedule(
  seed: int, request: int, num_layers: int, num_tokens: int, num_terms: int
) -> np.ndarray:
  """Orders for every layer and position: int32 [num_layers, num_tokens, num_terms].

  An order does not depend on how many layers or positions are asked for.
  """
  check_terms("dynamic_schedule", num_terms)
  with jax.threefry_partitionable(True):
    layers = _layer_keys(seed, request, num_layers)
    return _ranked_words(jax.vmap(lambda key: _fold_in_each(key, num_tokens))(layers), num_terms)


def _layer_keys(seed, request, num_layers):
  key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request)
  return _fold_in_each(key, num_layers)


def _fold_in_each(key, count):
  """Keys [count]: the key with 0, 1, … folded in."""
  return jax.vmap(lambda number: jax.random.fold_in(key, number))(np.arange(count, dtype=np.uint32))


def _ranked_words(keys, num_terms):
  """keys [...] → int32 [..., num_terms]: an order from each."""
  draw = lambda key: jax.random.bits(key, (num_terms,), np.uint32)
  words = jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, num_terms)
  return np.argsort(np.asarray(words), axis=-1, kind="stable").astype(np.int32)
