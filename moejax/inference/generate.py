"""Greedy generation: a batch of prompts, a shared prefix run once, ties recorded."""

from collections.abc import Sequence
import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.inference.batches import check_prompts, common_prefix, state_length
from moejax.inference.forward import check_nan, LoadedModel, prefill
from moejax.models import Execution, Mode, NATIVE, PersistentState, Taps
from moejax.models.execution import DEFAULT

_WATCH = Taps(nan_experts=True)


@dataclasses.dataclass(frozen=True)
class Generation:
  """What was generated.

  Attributes:
    tokens: int32 [B, N], emitted ids; they are the result, text is for people.
    ties: bool [B, N], whether the largest logit was shared; the lowest id was taken.
    state: after every emitted token but the last.
  """

  tokens: np.ndarray
  ties: np.ndarray
  state: PersistentState


def generate(
  model: LoadedModel,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
  chunk: int | None = None,
) -> Generation:
  """Greedy continuations of prompts of any lengths. An end-of-text token does not stop a row.

  Args:
    model: to run.
    prompts: token ids of each row. Tokens that all rows begin with are run once.
    max_new_tokens: N ≥ 1.
    execution: for every token of prompt and continuation; its T axis is 1.
    mode: static choices.
    chunk: tokens per prefill call.
  """
  if max_new_tokens < 1:
    raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
  check_prompts(prompts, model.config.vocab_size)
  length = state_length(max(map(len, prompts)) + max_new_tokens)
  shared = common_prefix(prompts) if len(prompts) > 1 and execution.rows_alike() else 0
  # Each row keeps a token of its own, for its logits.
  shared = min(shared, min(map(len, prompts)) - 1)
  options = dict(mode=mode, chunk=chunk)
  state = None
  if shared:
    _, one, _ = prefill(model, [prompts[0][:shared]], length, execution, **options)
    state = jax.tree.map(lambda x: jnp.repeat(x, len(prompts), axis=0), one)
    prompts = [prompt[shared:] for prompt in prompts]
  logits, state, _ = prefill(model, prompts, length, execution, state=state, **options)
  return continue_greedily(model, logits, state, max_new_tokens, execution, mode=mode)


def continue_greedily(
  model: LoadedModel,
  logits: jax.Array,
  state: PersistentState,
  num_tokens: int,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
) -> Generation:
  """Emits `num_tokens` from logits [B, V] and the state they came with."""
  execution.check(model.config.top_k, model.config.num_experts)
  if int(np.asarray(state.position).max()) + num_tokens - 1 > state.length:
    raise ValueError(
      f"{num_tokens} more tokens do not fit a state made for {state.length} positions."
    )
  start = np.asarray(state.position)
  first, tie = greedy(logits)
  (tokens, ties, nan), state = _loop(
    model.module, model.params, first, state, execution, mode=mode, steps=num_tokens - 1
  )
  check_nan(np.moveaxis(np.asarray(nan), 0, -1), start)
  tokens = np.concatenate([np.asarray(first)[:, None], np.asarray(tokens).T], axis=1)
  ties = np.concatenate([np.asarray(tie)[:, None], np.asarray(ties).T], axis=1)
  return Generation(tokens, ties, state)


def greedy(logits):
  """(lowest id of the largest logit int32 [B], whether it was shared bool [B]) of [B, V]."""
  shared = (logits == logits.max(axis=-1, keepdims=True)).sum(axis=-1) > 1
  return jnp.argmax(logits, axis=-1).astype(jnp.int32), shared


@functools.partial(jax.jit, static_argnums=0, static_argnames=("mode", "steps"))
def _loop(module, params, first, state, execution, *, mode, steps):
  """`steps` decode steps: ((tokens, ties [steps, B], NaN experts [steps, L, B]), state)."""

  def step(carry, _):
    token, state = carry
    logits, state, trace = module.apply(
      params, token[:, None], state, execution, mode=mode, taps=_WATCH
    )
    token, tie = greedy(logits[:, 0])
    return (token, state), (token, tie, trace["nan_experts"][..., 0])

  (_, state), out = lax.scan(step, (first, state), length=steps)
  return out, state
