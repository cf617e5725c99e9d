"""Teacher-forced scoring: the negative log likelihood of each token, in nats."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax.inference.batches import state_length
from moejax.inference.forward import check_nan, check_tokens, join_traces, LoadedModel
from moejax.models import Execution, Mode, NATIVE, Taps
from moejax.models.arithmetic import arithmetic
from moejax.models.execution import DEFAULT, NOTHING


@dataclasses.dataclass(frozen=True)
class Score:
  """A scored batch.

  Attributes:
    nll: float32 [B, T - prefill], nats, of tokens prefill .. T - 1.
    trace: of the taps, for the T - 1 tokens that were read.
    log_probabilities: float32 [B, T - prefill, V], if they were asked for.
  """

  nll: np.ndarray
  trace: dict[str, jax.Array]
  log_probabilities: np.ndarray | None = None


def score(
  model: LoadedModel,
  tokens,
  prefill: int = 1,
  execution: Execution = NATIVE,
  *,
  mode: Mode = DEFAULT,
  taps: Taps = NOTHING,
  chunk: int | None = None,
  keep: bool = False,
) -> Score:
  """Scores int [B, T] sequences given their own past.

  Under canonical arithmetic the result is, bit for bit, that of decoding token by token.

  Args:
    model: to run.
    tokens: T ≥ 2; -1 is padding at the end of a row, and its loss is 0.
    prefill: tokens that are given; 1 ≤ prefill < T.
    execution: its T axis, if any, has T - 1 entries.
    mode, taps: as in `forward`.
    chunk: tokens per call; None is all in one.
    keep: whether log probabilities of the whole vocabulary are returned.

  Raises:
    ValueError, FloatingPointError: as `forward`.
  """
  tokens = np.asarray(tokens, np.int32)
  config, (rows, time) = model.config, tokens.shape
  check_tokens(tokens, config.vocab_size)
  if not 1 <= prefill < time:
    raise ValueError(f"score: prefill must be within 1 .. {time - 1}, got {prefill}.")
  execution.check(config.top_k, config.num_experts)
  state = model.module.init_state(rows, state_length(time - 1), mode)
  step = chunk or time - 1
  parts, kept, traces = [], [], []
  for at in range(0, time - 1, step):
    stop = min(at + step, time - 1)
    # Logits that predict given tokens are not computed, beyond the one that a call must have.
    given = max(prefill - 1 - at, 0)
    first = min(given, stop - at - 1)
    nll, log_probabilities, state, trace = _chunk(
      model.module,
      model.params,
      tokens[:, at:stop],
      tokens[:, at + first + 1 : stop + 1],
      state,
      execution.take_tokens(np.arange(at, stop)),
      mode=mode,
      taps=dataclasses.replace(taps, nan_experts=True, logits=first),
      keep=keep,
    )
    check_nan(trace["nan_experts"], np.full(rows, at))
    parts.append(np.asarray(nll)[:, given - first :])
    if keep:
      kept.append(np.asarray(log_probabilities)[:, given - first :])
    traces.append(taps.select(trace))
  # One piece is not copied: log probabilities are large.
  join = lambda pieces: pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
  return Score(join(parts), join_traces(traces), join(kept) if keep else None)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("mode", "taps", "keep"))
def _chunk(module, params, tokens, targets, state, execution, *, mode, taps, keep):
  logits, state, trace = module.apply(params, tokens, state, execution, mode=mode, taps=taps)
  log_probabilities = arithmetic(mode).log_softmax(logits)
  at = jnp.maximum(targets, 0)[..., None]
  nll = -jnp.take_along_axis(log_probabilities, at, axis=-1)[..., 0]
  nll = jnp.where(targets < 0, np.float32(0), nll)
  return nll, log_probabilities if keep else None, state, trace
