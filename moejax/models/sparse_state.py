"""The persistent state of a DeepSeek-V4 layer, with the content that token steps leave in it.

Whatever chunk the tokens come in, rows are written as if one by one: the window is a ring by
position mod W; a compressor keeps the projections of its current (CSA: and previous) window.
"""

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from moejax.models.indexing import quotient, remainder, take
from moejax.models.packed_cache import stored_parts
from moejax.models.rings import overwrite, take_new
from moejax.models.run import Run
from moejax.models.state import Part


@struct.dataclass
class CompressorState:
  """Of one compressor with ratio m.

  Attributes:
    entries: [B, N / m, C], one per closed window; an attention's packed where the mode says so.
    values, scores: float32 [B, m, C] (HCA), [B, 2m, 2C] (CSA: previous window, then current):
      the projections, and their pooling logits with the position bias inside; 0 and -inf at first.
  """

  entries: jax.Array
  values: jax.Array
  scores: jax.Array

  @classmethod
  def empty(cls, entries, batch: int, ratio: int, overlap: bool, width: int):
    """With no window closed; entries as they are when empty."""
    series = 2 if overlap else 1
    shape = (batch, series * ratio, series * width)
    return cls(
      entries=entries,
      values=jnp.zeros(shape, jnp.float32),
      scores=jnp.full(shape, -jnp.inf, jnp.float32),
    )

  def advance(self, run: Run, ratio: int, values, scores, entries) -> "CompressorState":
    """After the tokens of the call: projections [B, T, F], and the entries with theirs appended."""
    return CompressorState(
      entries=entries,
      values=_advance(run, ratio, self.values, values),
      scores=_advance(run, ratio, self.scores, scores),
    )

  def parts(self, prefix: str, position, ratio: int) -> list[Part]:
    return [
      *stored_parts(f"{prefix}.entries", self.entries, position // ratio),
      Part(f"{prefix}.values", self.values),
      Part(f"{prefix}.scores", self.scores),
    ]


def _advance(run: Run, ratio: int, rows, new):
  current = rows[:, -ratio:]
  after = overwrite(run, current, new)
  if rows.shape[1] == ratio:
    return after
  # Closing a window copies it onto the previous one's rows; the last to close is what stays.
  closed = quotient(run.end, ratio)[:, None] * ratio
  position = closed - ratio + jnp.arange(ratio, dtype=jnp.int32)[None]
  fresh = (position >= run.start[:, None])[..., None]
  copied = jnp.where(fresh, take_new(run, new, position), current)
  any_closed = closed > run.start[:, None]
  previous = jnp.where(any_closed[..., None], copied, rows[:, :ratio])
  return jnp.concatenate([previous, after], axis=1)


@struct.dataclass
class SparseCache:
  """Of one layer.

  Attributes:
    window: [B, W, C], the ring of key-value vectors, packed where the mode says so.
    compressor: None in a window-only layer.
    indexer: CSA layers only.
    ratio: m, or 0.
  """

  window: jax.Array
  compressor: CompressorState | None
  indexer: CompressorState | None
  ratio: int = struct.field(pytree_node=False)

  def parts(self, position) -> list[Part]:
    """Window, compressed entries and compressor state, then the indexer's."""
    out = stored_parts("window", self.window)
    for name in ("compressor", "indexer"):
      state = getattr(self, name)
      if state is not None:
        out += state.parts(name, position, self.ratio)
    return out


def window_and_entries(run: Run, window, new, num_entries, chosen):
  """Where each query finds its keys: the window oldest to newest, then the chosen entries.

  Indices are into the concatenation of window [B, W, C], new [B, T, C] and the compressed entries.

  Args:
    run: positions.
    window, new: for their sizes.
    num_entries: int32 [B, T], how many chosen entries a query sees.
    chosen: int32 [B, T, k], entries in their order, the seen ones first.

  Returns:
    (index int32 [B, T, n], number of keys int32 [B, T]).
  """
  size, time = window.shape[1], new.shape[1]
  width = min(size, run.length)
  seen = jnp.minimum(run.positions + 1, size)[..., None]
  j = lax.broadcasted_iota(jnp.int32, (*run.positions.shape, width + chosen.shape[-1]), 2)
  position = run.positions[..., None] + 1 - seen + j
  fresh = position - run.start[:, None, None]
  in_window = jnp.where(fresh >= 0, size + fresh, remainder(position, size))
  at = jnp.clip(j - seen, 0, max(chosen.shape[-1] - 1, 0))
  compressed = size + time
  if chosen.shape[-1]:
    compressed = compressed + take(chosen, at, axis=2)
  return jnp.where(j < seen, in_window, compressed), seen[..., 0] + num_entries
