"""Decode steps with everything recorded that two executions can be compared by.

Checkpoints are hashed as SHA-256 of their canonical bytes: float32, little endian, row-major; of a
layer's persistent state the tensors in canonical order, without padding.
"""

from collections.abc import Sequence
import dataclasses
import hashlib

import jax.numpy as jnp
import numpy as np

from moejax.inference.forward import decode, LoadedModel
from moejax.inference.generate import greedy
from moejax.models import Delta, Execution, export, Mode, NATIVE, PersistentState, Taps
from moejax.models.execution import DEFAULT

# Of a single step: those of a frozen event too, so that one program serves both.
STEP_TAPS = Taps(
  terms=True,
  shared=True,
  combined=True,
  closing=True,
  post_block=True,
  ids=True,
  weights=True,
  slots=True,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
  """n decode steps of one row.

  Attributes:
    predictions: int32 [n], the greedy token after each step.
    post_block: float32 [n, L, ...], the state after each block (post-mHC).
    ids: int32 [n, L, K], the experts; -1 in layers without.
    state_sha256: n tuples of L, of the persistent state of each layer after each step.
    states: the persistent states after the steps.
  """

  predictions: np.ndarray
  post_block: np.ndarray
  ids: np.ndarray
  state_sha256: tuple[tuple[str, ...], ...]
  states: tuple[PersistentState, ...]

  def block_sha256(self, step: int, layer: int) -> str:
    """Of the state after a block."""
    return sha256(self.post_block[step, layer])


def follow(
  model: LoadedModel,
  token: int,
  state: PersistentState,
  num_steps: int,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
) -> Trajectory:
  """Reads a token, then what is predicted, for n steps.

  Args:
    model: to run.
    token: the first to be read.
    state: one row.
    num_steps: n.
    execution: of the first step only; those that follow are native.
    mode: static choices.
  """
  idle = idle_execution(model, 1)
  first = idle.replace(**{k: v for k, v in vars(execution).items() if v is not None})
  predictions, blocks, ids, hashes, states = [], [], [], [], []
  for step in range(num_steps):
    logits, state, trace = decode(
      model, [token], state, idle if step else first, mode=mode, taps=STEP_TAPS
    )
    token = int(greedy(logits)[0][0])
    predictions.append(token)
    blocks.append(np.asarray(trace["post_block"])[:, 0, 0])
    ids.append(np.asarray(trace["ids"])[:, 0, 0])
    hashes.append(layer_sha256(state))
    states.append(state)
  return Trajectory(
    np.array(predictions, np.int32), np.stack(blocks), np.stack(ids), tuple(hashes), tuple(states)
  )


def idle_execution(model: LoadedModel, rows: int) -> Execution:
  """Native, for one token of some rows: parts that do nothing, there as arrays.

  A step with a fork or a delta and one without are then the same program.
  """
  config = model.config
  return Execution(
    codes=jnp.full((config.num_layers, rows, 1), -1, jnp.int32),
    orders=jnp.full((config.num_layers, rows, 1, config.top_k), -1, jnp.int32),
    delta=Delta(
      layer=jnp.int32(-1),
      position=jnp.int32(-1),
      value=jnp.zeros((1, *config.state_shape), jnp.float32),
    ),
  )


def layer_sha256(state: PersistentState, row: int = 0) -> tuple[str, ...]:
  """Of each layer's persistent state."""
  parts: dict[str, list[np.ndarray]] = {}
  for name, value in export(state, row).items():
    parts.setdefault(name.split(".")[1], []).append(value)
  return tuple(sha256(*values) for values in parts.values())


def sha256(*values: np.ndarray) -> str:
  """Of the canonical bytes of float arrays, in hexadecimal."""
  digest = hashlib.sha256()
  for value in values:
    digest.update(np.ascontiguousarray(value, "<f4").tobytes())
  return digest.hexdigest()


def count_equal(ours: Sequence, theirs: Sequence) -> int:
  """How many entries of two sequences of the same length are equal."""
  return sum(a == b for a, b in zip(ours, theirs, strict=True))
