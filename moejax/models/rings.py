"""Rings of rows by position, with the content that one token after the other leaves in them."""

import jax.numpy as jnp

from moejax.models.indexing import remainder, take_rows
from moejax.models.run import Run


def overwrite(run: Run, rows, new):
  """A ring of rows [B, R, F], row r for positions ≡ r mod R, with new [B, T, F] written in turn."""
  size = rows.shape[1]
  last = run.end[:, None] - 1
  slot = jnp.arange(size, dtype=jnp.int32)[None]
  position = last - remainder(last - slot + size, size)  # the newest of each slot
  return jnp.where((position >= run.start[:, None])[..., None], take_new(run, new, position), rows)


def take_new(run: Run, new, position):
  """Rows of new [B, T, F] at absolute positions [B, n]; anything where there is none."""
  at = jnp.clip(position - run.start[:, None], 0, new.shape[1] - 1)
  return take_rows(new, at)
