"""Traces of a run as tables and tensor files."""

from collections.abc import Iterator, Sequence
import os

import jax
import numpy as np
import safetensors.numpy

from moejax.models import Config, export, PersistentState
from moejax.report.files import atomic_path

ROUTES = ("position", "token_id", "layer", "expert_ids", "weights", "slots", "margin", "tie")


def route_rows(
  config: Config, trace: dict[str, jax.Array], tokens: Sequence[int]
) -> Iterator[tuple[str, ...]]:
  """Rows of `ROUTES` for the first row of a batch, one per token and MoE layer.

  Args:
    config: of the model.
    trace: with the taps of `Taps.routes`.
    tokens: ids of the row, from position 0.
  """
  values = {name: np.asarray(trace[name])[:, 0] for name in ("ids", "weights", "slots")}
  margins, ties = np.asarray(trace["margins"])[:, 0], np.asarray(trace["ties"])[:, 0]
  for position, token in enumerate(tokens):
    for layer in config.moe_layers:
      ids, weights, slots = (values[name][layer, position] for name in ("ids", "weights", "slots"))
      yield (
        position,
        token,
        layer,
        ",".join(map(str, ids)),
        ",".join(f"{w:.9g}" for w in weights),
        ",".join(map(str, slots)),
        f"{margins[layer, position]:.9g}",
        int(ties[layer, position]),
      )


def write_tensors(path: str | os.PathLike, tensors: dict[str, np.ndarray]) -> None:
  """A safetensors file of NumPy arrays, written atomically."""
  with atomic_path(path) as temporary:
    safetensors.numpy.save_file(
      {name: np.ascontiguousarray(x) for name, x in tensors.items()}, temporary
    )


def state_tensors(state: PersistentState, row: int = 0) -> dict[str, np.ndarray]:
  """One row's persistent state with its position, for `write_tensors`."""
  return {"position": np.asarray(state.position[row]), **export(state, row)}
