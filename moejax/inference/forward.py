"""Prefill, chunked prefill and decode: compiled calls of a model, with the checks that need values.

Under canonical arithmetic it does not matter how tokens are cut into calls or rows into batches. A
program is compiled once for each shape, mode and selection of taps, and serves every execution.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from moejax.inference.batches import check_prompts, pad
from moejax.models import Config, Execution, Mode, Model, NATIVE, PersistentState, Taps
from moejax.models.execution import DEFAULT, NOTHING

# Prompts are padded to a multiple of this, so that few lengths are compiled.
_LENGTH_STEP = 16


class LoadedModel(Protocol):
  """What inference needs of a model: `moejax.load` gives it."""

  module: Model
  config: Config
  params: Any


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def compiled(module, params, tokens, state, execution, mode, taps):
  """`Model.apply`, compiled; the state is not donated, so that it can be forked."""
  return module.apply(params, tokens, state, execution, mode=mode, taps=taps)


def forward(
  model: LoadedModel,
  tokens,
  state: PersistentState,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
  taps: Taps = NOTHING,
) -> tuple[jax.Array, PersistentState, dict[str, jax.Array]]:
  """One call of the model on int32 [B, T] tokens; see `Model`. Values are checked on the host.

  Raises:
    ValueError: a token id outside the vocabulary, more tokens than the state has room for, or an
      execution that does not fit.
    FloatingPointError: an expert that a token chose gave a NaN; says layer, token and expert.
  """
  tokens = np.asarray(tokens)
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {tokens.shape}.")
  config = model.config
  check_tokens(tokens, config.vocab_size)
  end = int((np.asarray(state.position) + (tokens >= 0).sum(axis=1)).max())
  if end > state.length:
    raise ValueError(f"{end} tokens do not fit a state made for {state.length} positions.")
  execution.check(config.top_k, config.num_experts)
  watched = dataclasses.replace(taps, nan_experts=True)
  tokens = jnp.asarray(tokens, jnp.int32)
  logits, after, trace = compiled(
    model.module, model.params, tokens, state, execution, mode, watched
  )
  check_nan(trace["nan_experts"], np.asarray(state.position))
  return logits, after, taps.select(trace)


def check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
  """Refuses ids beyond the vocabulary, and padding that is not at the end of a row."""
  if tokens.max() >= vocab_size:
    raise ValueError(f"token id {tokens.max()} is outside the vocabulary of {vocab_size}.")
  if ((tokens[:, :-1] < 0) & (tokens[:, 1:] >= 0)).any():
    raise ValueError("a negative token id is padding and stands at the end of a row only.")


def check_nan(nan_experts, start) -> None:
  """Raises if an expert that a token chose gave a NaN.

  Args:
    nan_experts: int32 [L, B, T], as traced.
    start: int [B], position of the first token.
  """
  found = np.argwhere(np.asarray(nan_experts) >= 0)
  if len(found):
    layer, row, token = found[0]
    expert = int(nan_experts[layer, row, token])
    raise FloatingPointError(
      f"layer {layer}, row {row}, position {start[row] + token}: expert {expert} gave a NaN."
    )


def prefill(
  model: LoadedModel,
  prompts: Sequence[Sequence[int]],
  length: int,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
  taps: Taps = NOTHING,
  chunk: int | None = None,
  state: PersistentState | None = None,
) -> tuple[jax.Array, PersistentState, dict[str, jax.Array]]:
  """Runs prompts, of any lengths, from an empty state or on from a given one.

  Args:
    model: to run.
    prompts: token ids of each row.
    length: positions the state is made for, prompt included.
    execution: broadcast over the prompt; a T axis counts its tokens.
    mode, taps: as in `forward`.
    chunk: tokens per call; None is all in one. Bits do not depend on it.
    state: to go on from, one row per prompt.

  Returns:
    (logits float32 [B, V] after the last token of each row, state, trace with the padded T axis).
  """
  check_prompts(prompts, model.config.vocab_size)
  longest = max(map(len, prompts))
  start = 0 if state is None else int(np.asarray(state.position).max())
  if start + longest > length:
    raise ValueError(f"a prompt of {start + longest} tokens does not fit {length} positions.")
  if state is None:
    state = model.module.init_state(len(prompts), length, mode)
  tokens = pad(prompts, chunk or _LENGTH_STEP)
  step = chunk or tokens.shape[1]
  last = dataclasses.replace(taps, logits="last")
  logits, traces = None, []
  for at in range(0, tokens.shape[1], step):
    piece = tokens[:, at : at + step]
    part = _padded(execution, longest, at, at + step)
    new, state, trace = forward(model, piece, state, part, mode=mode, taps=last)
    new = new[:, 0]
    read = jnp.asarray((piece >= 0).any(axis=1))[:, None]
    logits = new if logits is None else jnp.where(read, new, logits)
    traces.append(trace)
  return logits, state, join_traces(traces)


def _padded(execution: Execution, time: int, start: int, stop: int) -> Execution:
  """The execution of some tokens; those behind the prompt repeat its last one."""
  index = np.minimum(np.arange(start, stop), time - 1)
  return execution.take_tokens(index)


def decode(
  model: LoadedModel,
  tokens,
  state: PersistentState,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
  taps: Taps = NOTHING,
) -> tuple[jax.Array, PersistentState, dict[str, jax.Array]]:
  """One token for each row: int [B] → (logits float32 [B, V], state, trace)."""
  tokens = np.asarray(tokens)[:, None]
  logits, state, trace = forward(model, tokens, state, execution, mode=mode, taps=taps)
  return logits[:, 0], state, trace


def join_traces(traces: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
  """Traces of consecutive calls as one, along T; of a state fingerprint the last one."""
  return {
    name: traces[-1][name]
    if name == "state_fingerprints"
    else jnp.concatenate([trace[name] for trace in traces], axis=2)
    for name in traces[0]
  }
