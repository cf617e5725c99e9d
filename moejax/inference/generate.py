"""Greedy generation: a batch of prompts, a shared prefix run once, ties recorded."""

from collections.abc import Sequence
import dataclasses

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
  donate: bool = False,
) -> Generation:
  """Emits `num_tokens` from logits [B, V] and the state they came with; see `emit`."""
  first, tie = (np.asarray(x)[:, None] for x in greedy(logits))
  if num_tokens == 1:
    return Generation(first, tie, state)
  rest = emit(model, first[:, 0], state, num_tokens - 1, execution, mode=mode, donate=donate)
  pairs = ((first, rest.tokens), (tie, rest.ties))
  return Generation(*(np.concatenate(pair, axis=1) for pair in pairs), rest.state)


def emit(
  model: LoadedModel,
  token,
  state: PersistentState,
  num_tokens: int,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
  donate: bool = False,
) -> Generation:
  """Reads a token in every row, then what it emits: N = `num_tokens` greedy ones.

  Args:
    model: to run.
    token: int [B].
    state: before it.
    num_tokens: N ≥ 1. The number is an argument of the program: few are compiled.
    execution: for every token that is read; its T axis is 1.
    mode: static choices.
    donate: whether the state is given away and its memory used again.
  """
  execution.check(model.config.top_k, model.config.num_experts)
  start = np.asarray(state.position)
  if num_tokens < 1:
    raise ValueError(f"num_tokens must be at least 1, got {num_tokens}.")
  if start.max() + num_tokens > state.length:
    raise ValueError(
      f"{num_tokens} more tokens do not fit a state made for {state.length} positions, of which "
      f"{start.max()} are in use."
    )
  (tokens, ties, nan), state = (_donating if donate else _keeping)(
    model.module,
    model.params,
    jnp.asarray(token, jnp.int32),
    state,
    execution,
    jnp.int32(num_tokens),
    mode=mode,
    room=state_length(num_tokens),
  )
  tokens, ties, nan = (np.asarray(x)[:num_tokens] for x in (tokens, ties, nan))
  check_nan(np.moveaxis(nan, 0, -1), start)
  return Generation(tokens.T, ties.T, state)


def greedy(logits):
  """(lowest id of the largest logit int32 [B], whether it was shared bool [B]) of [B, V]."""
  shared = (logits == logits.max(axis=-1, keepdims=True)).sum(axis=-1) > 1
  return jnp.argmax(logits, axis=-1).astype(jnp.int32), shared


def _loop(module, params, first, state, execution, steps, *, mode, room):
  """`steps` ≤ room decode steps: ((tokens, ties [room, B], NaN experts [room, L, B]), state)."""
  rows = first.shape[0]
  empty = (
    jnp.zeros((room, rows), jnp.int32),
    jnp.zeros((room, rows), bool),
    jnp.full((room, module.config.num_layers, rows), -1, jnp.int32),
  )

  def step(carry):
    at, token, state, out = carry
    logits, state, trace = module.apply(
      params, token[:, None], state, execution, mode=mode, taps=_WATCH
    )
    token, tie = greedy(logits[:, 0])
    new = (token, tie, trace["nan_experts"][..., 0])
    out = tuple(lax.dynamic_update_index_in_dim(x, y, at, 0) for x, y in zip(out, new))
    return at + 1, token, state, out

  carry = (jnp.int32(0), first, state, empty)
  _, _, state, out = lax.while_loop(lambda carry: carry[0] < steps, step, carry)
  return out, state


_keeping = jax.jit(_loop, static_argnums=0, static_argnames=("mode", "room"))
_donating = jax.jit(
  _loop, static_argnums=0, static_argnames=("mode", "room"), donate_argnames="state"
)
