"""Fingerprints of float32 vectors, made on the device.

A fingerprint is two 64-bit NH sums (Black et al. 1999) over the vector's bits, keyed by position:
two different vectors collide with probability at most 2^-64 each. The keys are fixed, so that
fingerprints can be stored and compared between runs. Every NaN counts as one pattern.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import backend, layout

_TILE = 1024  # columns that a fingerprint packs together
_WIDEST = 131_072  # columns of one NH sum: `_sum_of_products` adds up to 65,536 pairs


def fingerprint(x: jax.Array) -> jax.Array:
  """float32 [..., N] → uint32 [..., 4]; a longer row is the fingerprint of its pieces' ones."""
  backend.require_float32("fingerprint", x)
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  return _fingerprint_bits(jnp.where(_is_nan(bits), layout.NAN, bits))


def _fingerprint_bits(bits):
  width = bits.shape[-1]
  if width > _WIDEST:
    lead = bits.shape[:-1]
    bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, -width % _WIDEST)])
    pieces = _fingerprint_bits(bits.reshape(*lead, -1, _WIDEST))
    return _fingerprint_bits(pieces.reshape(*lead, -1))
  lead = bits.shape[:-1]
  # Tiles of 1024 columns; word j of one holds halves of columns j and j + 512 (kernels/combine.cc).
  bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, -width % _TILE)])
  bits = bits.reshape(*lead, -1, 2, _TILE // 2)
  left, right = (bits[..., side, :].reshape(*lead, -1) for side in (0, 1))
  halves = ((left >> 16) | (right & layout.HIGH_HALF), _low(left) | (right << 16))
  words = []
  for stream in range(2):
    keyed = jnp.concatenate(
      [
        half + jnp.broadcast_to(nh_keys(width, stream, at), half.shape)
        for at, half in enumerate(halves)
      ],
      axis=-1,
    )
    words.extend(_sum_of_products(keyed[..., 0::2], keyed[..., 1::2]))
  return jnp.stack(words, axis=-1)


def nh_keys(width: int, stream: int, half: int) -> np.ndarray:
  """NH key of each word of a vector, by position: uint32; 0 where a pair of words has no column."""
  tiles = -(-width // _TILE)
  word = np.arange(tiles * _TILE // 2, dtype=np.uint32)
  column = word // np.uint32(_TILE // 2) * np.uint32(_TILE) + word % np.uint32(_TILE // 2)
  pair = column // np.uint32(2) * np.uint32(2)
  # The finaliser of MurmurHash3 over a counter.
  x = np.uint32(4) * word + np.uint32(2 * half + stream + 1)
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return np.where(pair < width, x ^ (x >> 16), np.uint32(0))


def _is_nan(bits):
  return (bits & layout.MAGNITUDE) > layout.INFINITY


def _sum_of_products(x, y):
  """Σ x·y over the last axis mod 2^64, from uint32, as low and high words; up to 65,536 pairs."""
  # Four 32-bit partial products at 2^0, 2^16, 2^16, 2^32, each summed as 16-bit halves.
  places = [jnp.zeros(x.shape[:-1], jnp.uint32) for _ in range(4)]
  for shift, product in (
    (0, _low(x) * _low(y)),
    (1, _low(x) * (y >> 16)),
    (1, (x >> 16) * _low(y)),
    (2, (x >> 16) * (y >> 16)),
  ):
    for place, half in ((shift, _low(product)), (shift + 1, product >> 16)):
      total = half.sum(axis=-1, dtype=jnp.uint32)
      places[place] += _low(total)
      if place < 3:
        places[place + 1] += total >> 16
  for i in range(3):
    places[i + 1] += places[i] >> 16
  return _low(places[0]) | places[1] << 16, _low(places[2]) | places[3] << 16


def _low(words):
  return words & np.uint32(0xFFFF)
