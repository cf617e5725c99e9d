"""The four-run apparatus: what of a disturbance's damage goes through routing (route study).

Y_CC  clean computation, its own routes      Y_QP  disturbed computation, clean routes pinned
Y_CT  clean computation, disturbed routes    Y_QF  disturbed computation, its own routes
"""

import dataclasses

import numpy as np

from moejax.inference.forward import LoadedModel
from moejax.inference.score import score
from moejax.models import Execution, Mode, NATIVE, Pins, Taps
from moejax.models.execution import DEFAULT

_ROUTES = Taps(ids=True, weights=True, slots=True)
_AXIS_OF_ROWS = dict(cc=0, qp=0, qf=0, ct=0, kl_qp=0, kl_qf=0, kl_ct=0)
_AXIS_OF_ROWS |= dict(clean_ids=1, disturbed_ids=1)


@dataclasses.dataclass(frozen=True)
class Condition:
  """How a run computes: its static choices and arrays."""

  mode: Mode = DEFAULT
  execution: Execution = NATIVE


_CLEAN = Condition()


@dataclasses.dataclass(frozen=True)
class FourRun:
  """Negative log likelihoods, float32 [B, N] nats, of the scored tokens, and routes.

  Attributes:
    cc, qp, qf, ct: see the module.
    clean_ids, disturbed_ids: int32 [L, B, T, K] of CC and QF, of all tokens that were read.
    prefill: tokens that were given; N = T + 1 - prefill.
    kl_qp, kl_qf, kl_ct: float64 [B, N], KL(CC || run) of the next token in nats, if asked for.
  """

  cc: np.ndarray
  qp: np.ndarray
  qf: np.ndarray
  ct: np.ndarray
  clean_ids: np.ndarray
  disturbed_ids: np.ndarray
  prefill: int
  kl_qp: np.ndarray | None = None
  kl_qf: np.ndarray | None = None
  kl_ct: np.ndarray | None = None

  @property
  def total(self) -> np.ndarray:
    """QF - CC, float64 [B, N]: what the disturbance does."""
    return self.qf.astype(np.float64) - self.cc

  @property
  def compute(self) -> np.ndarray:
    """QP - CC: what it does with clean routes."""
    return self.qp.astype(np.float64) - self.cc

  @property
  def route_forward(self) -> np.ndarray:
    """QF - QP: what its routes do in disturbed computation."""
    return self.qf.astype(np.float64) - self.qp

  @property
  def route_pure(self) -> np.ndarray:
    """CT - CC: what its routes do in clean computation."""
    return self.ct.astype(np.float64) - self.cc

  @property
  def interaction(self) -> np.ndarray:
    """The difference of the two: total = compute + route_pure + interaction."""
    return self.route_forward - self.route_pure

  def flips(self) -> np.ndarray:
    """bool [L, B, N]: whether the set of experts changed at the tokens that give the scores."""
    changed = (self.clean_ids != self.disturbed_ids).any(axis=-1)
    return changed[:, :, self.prefill - 1 :]


def four_run(
  model: LoadedModel,
  tokens: np.ndarray,
  disturbed: Condition,
  clean: Condition = _CLEAN,
  *,
  prefill: int = 64,
  rows: int = 8,
  divergence: bool = False,
) -> FourRun:
  """Scores int [B, T + 1] sequences under the four conditions.

  Args:
    model: to run.
    tokens: sequences.
    disturbed, clean: neither may pin routes.
    prefill: tokens that are given.
    rows: sequences per call; the arrays of both executions have no axis of rows, or all of them.
    divergence: whether the KL divergences are wanted.
  """
  parts = []
  for at in range(0, len(tokens), rows):
    here = slice(at, at + rows)
    pair = (dataclasses.replace(c, execution=c.execution.rows(here)) for c in (disturbed, clean))
    parts.append(_four(model, tokens[here], *pair, prefill, divergence))
  joined = {
    name: np.concatenate([part[name] for part in parts], axis=axis)
    for name, axis in _AXIS_OF_ROWS.items()
    if name in parts[0]
  }
  return FourRun(prefill=prefill, **joined)


def _four(model, tokens, disturbed: Condition, clean: Condition, prefill: int, divergence: bool):
  def run(condition: Condition, pins: Pins | None = None):
    execution = condition.execution.replace(pins=pins)
    return score(
      model, tokens, prefill, execution, mode=condition.mode, taps=_ROUTES, keep=divergence
    )

  cc, qf = run(clean), run(disturbed)
  qp, ct = run(disturbed, Pins.from_trace(cc.trace)), run(clean, Pins.from_trace(qf.trace))
  ids = [np.asarray(s.trace["ids"]) for s in (cc, qf)]
  out = dict(cc=cc.nll, qp=qp.nll, qf=qf.nll, ct=ct.nll, clean_ids=ids[0], disturbed_ids=ids[1])
  if divergence:
    for name, scored in (("kl_qp", qp), ("kl_qf", qf), ("kl_ct", ct)):
      out[name] = kl_divergence(cc.log_probabilities, scored.log_probabilities)
  return out


def kl_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """KL(P || Q) in nats over the last axis of log probabilities, in float64, row by row."""
  rows = []
  for a, b in zip(p, q, strict=True):
    a = a.astype(np.float64)
    rows.append((np.exp(a) * (a - b)).sum(axis=-1))
  return np.stack(rows)
