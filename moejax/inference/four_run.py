"""The four-run apparatus: what of a disturbance's damage goes through routing (route study).

Y_CC  clean computation, its own routes      Y_QP  disturbed computation, clean routes pinned
Y_CT  clean computation, disturbed routes    Y_QF  disturbed computation, its own routes
"""

import dataclasses

import numpy as np

from moejax.inference.disturbances import Disturbance
from moejax.inference.forward import LoadedModel
from moejax.inference.routed import Condition, Routed, ROWS, run_routed, slice_rows
from moejax.models import Mode
from moejax.models.execution import DEFAULT


@dataclasses.dataclass(frozen=True)
class Controls:
  """The largest |ΔNLL| of runs that must not differ, in nats; each must be 0.

  Attributes:
    clean_pinned: the clean run with its own routes imposed, against the clean run.
    disturbed_pinned: the disturbed run with its own routes imposed, against itself.
    idle: the disturbance at the setting that does nothing, against the clean run; None without one.
    sequences: how many were compared.
  """

  clean_pinned: float
  disturbed_pinned: float
  idle: float | None
  sequences: int

  def check(self) -> None:
    """Raises ValueError, naming the control, unless all are 0."""
    for name in ("clean_pinned", "disturbed_pinned", "idle"):
      value = getattr(self, name)
      if value is not None and not value == 0:
        raise ValueError(
          f"four_run: the control {name} is {value:.3g} nats, expected exactly 0; "
          "the contrast is refused."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class FourRun:
  """The four runs of one disturbance; contrasts are float64 [B, N] nats of the scored tokens."""

  cc: Routed
  qp: Routed
  qf: Routed
  ct: Routed
  controls: Controls | None = None

  @property
  def total(self) -> np.ndarray:
    """QF - CC: what the disturbance does."""
    return self.qf.nll.astype(np.float64) - self.cc.nll

  @property
  def compute(self) -> np.ndarray:
    """QP - CC: what it does with clean routes."""
    return self.qp.nll.astype(np.float64) - self.cc.nll

  @property
  def route_forward(self) -> np.ndarray:
    """QF - QP: what its routes do in disturbed computation; the harm of a token."""
    return self.qf.nll.astype(np.float64) - self.qp.nll

  @property
  def route_pure(self) -> np.ndarray:
    """CT - CC: what its routes do in clean computation."""
    return self.ct.nll.astype(np.float64) - self.cc.nll

  @property
  def interaction(self) -> np.ndarray:
    """The difference of the two: total = compute + route_pure + interaction."""
    return self.route_forward - self.route_pure

  def flips(self) -> np.ndarray:
    """bool [L, B, N]: whether the set of experts changed at the tokens that give the scores."""
    return self.cc.flips(self.qf)


def four_run(
  model: LoadedModel,
  tokens: np.ndarray,
  disturbance: Disturbance,
  cc: Routed | None = None,
  *,
  mode: Mode = DEFAULT,
  prefill: int = 64,
  rows: int = ROWS,
  statistics: bool = False,
  divergence: bool = False,
  controls: int | None = None,
) -> FourRun:
  """Scores int [B, T + 1] sequences under the four conditions, after the controls.

  Args:
    model: to run.
    tokens: sequences.
    disturbance: what is done to the computation.
    cc: the clean run of the same sequences, if there is one, with log probabilities kept where
      divergences are wanted.
    mode: static choices of the clean run.
    prefill: tokens that are given.
    rows: sequences per call.
    statistics: whether margins, ties and router logits of QF are wanted.
    divergence: whether KL divergences from CC are wanted.
    controls: how many sequences the controls run on, all by default; 0 runs none.

  Raises:
    ValueError: a control that is not exactly zero; as `score`.
  """
  clean, condition = Condition(mode), disturbance.condition(model, mode, *tokens.shape)
  common = dict(prefill=prefill, rows=rows)
  if cc is None:
    cc = run_routed(model, tokens, clean, keep=divergence, **common)
  reference = cc.log_probabilities if divergence else None
  run = lambda *args, **more: run_routed(
    model, tokens, *args, reference=reference, **common, **more
  )
  qf, checked = run(condition, statistics=statistics), None
  if controls != 0:
    conditions = clean, condition, disturbance.idle(model, mode, *tokens.shape)
    checked = run_controls(model, tokens[:controls], *conditions, cc, qf, keep=divergence, **common)
    checked.check()
  return FourRun(cc, run(condition, cc.pins()), qf, run(clean, qf.pins()), checked)


def run_controls(
  model: LoadedModel,
  tokens: np.ndarray,
  clean: Condition,
  condition: Condition,
  idle: Condition | None,
  cc: Routed,
  qf: Routed,
  **common,
) -> Controls:
  """The identity controls of a disturbance on the first sequences of the runs CC and QF."""
  cc, qf = (slice_rows(run, range(len(tokens))) for run in (cc, qf))
  run = lambda *args: run_routed(model, tokens, *args, **common)
  largest = lambda a, b: float(np.abs(a.nll.astype(np.float64) - b.nll).max())
  return Controls(
    clean_pinned=largest(run(clean, cc.pins()), cc),
    disturbed_pinned=largest(run(condition, qf.pins()), qf),
    idle=None if idle is None else largest(run(idle), cc),
    sequences=len(tokens),
  )
