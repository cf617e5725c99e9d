"""Scored runs whose routes are seen, replaced and compared: what the route study is made of."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.inference.forward import LoadedModel
from moejax.inference.score import score
from moejax.models import Config, Execution, Mode, NATIVE, Pins, Taps
from moejax.models.arithmetic import arithmetic
from moejax.models.execution import DEFAULT
from moejax.numerics import materialize

ROWS = 16  # sequences per call; bits do not depend on it
# Asked for or not, so that all runs share one program.
_TAPS = Taps.routes()
_STATISTICS = ("margins", "ties", "router_logits")


@dataclasses.dataclass(frozen=True, eq=False)
class Condition:
  """How a run computes.

  Attributes:
    mode: static choices.
    execution: arrays, those of all sequences where one has an axis of rows; no pins.
    params: other parameters than the model's, or None.
  """

  mode: Mode = DEFAULT
  execution: Execution = NATIVE
  params: Any = None


CLEAN = Condition()


@dataclasses.dataclass(frozen=True, eq=False)
class Routed:
  """A scored run of B sequences of T + 1 tokens, of which the last N are scored, and its routes.

  Attributes:
    nll: float32 [B, N], nats.
    ids, weights, slots: [L, B, T, K] of all tokens that were read; see `Taps`.
    prefill: tokens that were given; N = T + 1 - prefill.
    margins: float32 [L, B, N], where statistics were asked for: see `Taps`.
    ties: bool [L, B, N], likewise.
    router_logits: float32 [L, B, N, E], likewise.
    kl: float32 [B, N], KL(reference || run) of the next token in nats, where there is a reference.
    log_probabilities: float32 [B, N, V], where they were kept.
  """

  nll: np.ndarray
  ids: np.ndarray
  weights: np.ndarray
  slots: np.ndarray
  prefill: int
  margins: np.ndarray | None = None
  ties: np.ndarray | None = None
  router_logits: np.ndarray | None = None
  kl: np.ndarray | None = None
  log_probabilities: np.ndarray | None = None

  def pins(self, mask=True) -> Pins:
    """Its routes, to be imposed where the mask, broadcastable to [L, B, T], is true."""
    return Pins(self.ids, self.weights, self.slots, np.asarray(mask, bool))

  def flips(self, other: "Routed") -> np.ndarray:
    """bool [L, B, N]: where the sets of experts differ at the tokens that give the scores."""
    return (self.ids != other.ids).any(axis=-1)[:, :, self.prefill - 1 :]


_AXIS_OF_ROWS = dict(nll=0, kl=0, log_probabilities=0)
_AXIS_OF_ROWS |= dict.fromkeys(("ids", "weights", "slots", "margins", "ties", "router_logits"), 1)


def run_routed(
  model: LoadedModel,
  tokens: np.ndarray,
  condition: Condition = CLEAN,
  pins: Pins | None = None,
  *,
  prefill: int = 64,
  rows: int = ROWS,
  statistics: bool = False,
  reference: np.ndarray | None = None,
  keep: bool = False,
) -> Routed:
  """Scores int [B, T + 1] sequences under a condition, with routes of another run or its own.

  Args:
    model: to run.
    tokens: sequences.
    condition: how.
    pins: routes, those of all sequences.
    prefill: tokens that are given.
    rows: sequences per call.
    statistics: whether margins, ties and router logits are wanted.
    reference: float32 [B, N, V], log probabilities of another run, for `kl`.
    keep: whether log probabilities are wanted.

  Raises:
    ValueError, FloatingPointError: as `score`; a NaN loss, with its sequence and position.
  """
  if condition.params is not None:
    model = dataclasses.replace(model, params=condition.params)
  shape, parts = (min(rows, len(tokens)), tokens.shape[1] - 1), []
  for start in range(0, len(tokens), rows):
    # A short last batch repeats its last row: one shape is compiled.
    index = np.minimum(np.arange(start, start + shape[0]), len(tokens) - 1)
    execution = whole(condition.execution.replace(pins=pins).rows(index), model.config, *shape)
    wanted = keep or reference is not None
    found = score(
      model, tokens[index], prefill, execution, mode=condition.mode, taps=_TAPS, keep=wanted
    )
    part = dict(nll=found.nll) | {name: np.asarray(x) for name, x in found.trace.items()}
    for name in _STATISTICS:
      values = part.pop(name)
      if statistics:
        part[name] = values[:, :, prefill - 1 :]
    if keep:
      part["log_probabilities"] = found.log_probabilities
    if reference is not None:
      part["kl"] = kl_divergence(reference[index], found.log_probabilities)
    count = min(rows, len(tokens) - start)
    for name, x in part.items():
      part[name] = np.take(x, range(count), axis=_AXIS_OF_ROWS[name])
    parts.append(part)
  joined = {n: np.concatenate([p[n] for p in parts], axis=_AXIS_OF_ROWS[n]) for n in parts[0]}
  check_nll(joined["nll"], prefill)
  return Routed(prefill=prefill, **joined)


def whole(execution: Execution, config: Config, rows: int, time: int) -> Execution:
  """The execution with every part that a disturbance may have, so that all share one program."""
  shape, top_k = (config.num_layers, rows, time), config.top_k

  def part(x, tail, dtype, default):
    x = default if x is None else x
    return np.broadcast_to(np.asarray(x, dtype), (*shape, *tail))

  pins = execution.pins or Pins(0, 0, 0, False)
  return execution.replace(
    codes=part(execution.codes, (), np.int32, -1),
    orders=part(execution.orders, (top_k,), np.int32, -1),
    pins=Pins(
      part(pins.ids, (top_k,), np.int32, 0),
      part(pins.weights, (top_k,), np.float32, 0),
      part(pins.slots, (top_k,), np.int32, 0),
      part(pins.mask, (), bool, False),
    ),
    kv_bits=part(execution.kv_bits, (), np.int32, 0),
    kv_strength=part(execution.kv_strength, (), np.float32, 1),
    softening=part(execution.softening, (), np.float32, 0),
  )


def check_nll(nll: np.ndarray, prefill: int) -> None:
  """Refuses a NaN loss [B, N]; names sequence and position."""
  bad = np.argwhere(np.isnan(nll))
  if len(bad):
    sequence, token = map(int, bad[0])
    raise FloatingPointError(f"sequence {sequence}, position {prefill + token}: the loss is NaN.")


@functools.partial(jax.jit, static_argnames="mode")
def _kl(p, q, mode=DEFAULT):
  ops, x = arithmetic(mode), q - p
  # exp(x) - 1 - x, by its series where that cancels. Each term of the sum is then at least 0, and
  # what rounding left of the normalisation of P and Q counts in second order only.
  series = jnp.full(x.shape, 1 / 9, jnp.float32)
  for n in (8, 7, 6, 5, 4, 3):
    series = ops.multiply(1 + ops.multiply(x, series), np.float32(1 / n))
  near = ops.multiply(ops.multiply(x, x), np.float32(0.5) * (1 + ops.multiply(x, series)))
  far = ops.exp(jnp.minimum(x, 80)) - 1 - x
  # In memory, or XLA computes the terms within the sum, several times slower.
  terms = ops.multiply(ops.exp(p), jnp.where(jnp.abs(x) < 0.5, near, far))
  return ops.sum(materialize(terms))


def kl_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """KL(P || Q) in nats, float32 [...], of log probabilities float32 [..., V]."""
  return np.asarray(_kl(p, q))


def slice_rows(routed: Routed, index: Sequence[int]) -> Routed:
  """Some sequences of a run."""
  parts = {
    name: np.take(value, index, axis=axis)
    for name, axis in _AXIS_OF_ROWS.items()
    if (value := getattr(routed, name)) is not None
  }
  return dataclasses.replace(routed, **parts)
