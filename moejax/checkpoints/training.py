"""State of a training run on disk, so that a run can be killed at any moment and resumed."""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_KEPT = 2


def save_training(directory: str | os.PathLike, step: int, tree: Any) -> None:
  """Writes the state after a step, whole or not at all; the last two are kept.

  Args:
    directory: of the run, made if it is not there.
    step: larger than that of any state there.
    tree: pytree of arrays.

  Raises:
    ValueError: a step that is not larger.
    OSError: it could not be written, on a full disk for one; what was saved before is still there.
  """
  with _manager(directory) as manager:
    latest = manager.latest_step()
    if latest is not None and step <= latest:
      raise ValueError(f"{directory}: step {step} is not after {latest}, the last one saved.")
    try:
      manager.save(step, args=ocp.args.StandardSave(tree))
    except (OSError, ValueError) as error:  # its storage says ValueError to a full disk
      kept = (
        "nothing was saved before" if latest is None else f"that of step {latest} is still there"
      )
      reason = str(error).rsplit(": ", 1)[-1]
      raise OSError(
        f"{directory}: the state of step {step} was not written, {kept}: {reason}."
      ) from error


def restore_latest(directory: str | os.PathLike, template: Any) -> tuple[int, Any] | None:
  """Reads the state with the largest step.

  Args:
    directory: of the run.
    template: pytree of arrays with the structure, shapes, dtypes and placement of the state.

  Returns:
    (step, tree), or None where nothing was saved.

  Raises:
    ValueError: the saved state is of another structure, shape or dtype.
  """
  if not pathlib.Path(directory).is_dir():
    return None
  with _manager(directory) as manager:
    step = manager.latest_step()
    if step is None:
      return None
    _refuse_other_structure(directory, manager.item_metadata(step).tree, template)
    return step, manager.restore(step, args=ocp.args.StandardRestore(template))


def _manager(directory: str | os.PathLike) -> ocp.CheckpointManager:
  # Saving is synchronous: what a script says it saved is on disk.
  options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
  path = pathlib.Path(directory).resolve()
  handler = ocp.StandardCheckpointHandler()
  return ocp.CheckpointManager(path, options=options, item_handlers=handler)


def _refuse_other_structure(directory, saved: Any, template: Any) -> None:
  """Raises if restoring would fail, or would cast to another dtype without a word."""
  saved, template = _summary(saved), _summary(template)
  for key in sorted(saved.keys() | template.keys()):
    found, expected = (side.get(key, "nothing") for side in (saved, template))
    if found != expected:
      raise ValueError(
        f"{directory}: the saved state is not of this run: {key} is {found}, expected {expected}."
      )


def _summary(tree: Any) -> dict[str, str]:
  """Dtype and shape by path; tuples, records and dictionaries spell a path alike."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(path): f"{np.dtype(leaf.dtype).name} {leaf.shape}" for path, leaf in leaves}
