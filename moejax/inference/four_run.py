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
_AXIS_OF_ROWS = dict(cc=0, qp=0, qf=0, ct=0, clean_ids=1, disturbed_ids=1)


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
  """

  cc: np.ndarray
  qp: np.ndarray
  qf: np.ndarray
  ct: np.ndarray
  clean_ids: np.ndarray
  disturbed_ids: np.ndarray
  prefill: int

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
) -> FourRun:
  """Scores int [B, T + 1] sequences under the four conditions.

  Args:
    model: to run.
    tokens: sequences.
    disturbed, clean: neither may pin routes.
    prefill: tokens that are given.
    rows: sequences per call.
  """
  parts = [
    _four(model, tokens[at : at + rows], disturbed, clean, prefill)
    for at in range(0, len(tokens), rows)
  ]
  joined = {
    name: np.concatenate([part[name] for part in parts], axis=axis)
    for name, axis in _AXIS_OF_ROWS.items()
  }
  return FourRun(prefill=prefill, **joined)


def _four(model, tokens, disturbed: Condition, clean: Condition, prefill: int):
  def run(condition: Condition, pins: Pins | None = None):
    execution = condition.execution.replace(pins=pins)
    return score(model, tokens, prefill, execution, mode=condition.mode, taps=_ROUTES)

  cc, qf = run(clean), run(disturbed)
  qp, ct = run(disturbed, Pins.from_trace(cc.trace)), run(clean, Pins.from_trace(qf.trace))
  ids = [np.asarray(s.trace["ids"]) for s in (cc, qf)]
  return dict(cc=cc.nll, qp=qp.nll, qf=qf.nll, ct=ct.nll, clean_ids=ids[0], disturbed_ids=ids[1])
