"""How a disturbance grows through the depth of a model, token by token.

δx is the disturbed state of a token minus its clean one, at each of S states in order of depth;
a step leads from one state to the next, so there are S - 1.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Gain:
  """Growth of ‖δx‖; float64 unless said, NaN where a number is undefined.

  Attributes:
    gains: [S - 1], median over tokens of ‖δx after‖ / ‖δx before‖.
    product: of `gains`.
    relative_gains: [S - 1], the same of ‖δx‖ / ‖x‖, with x the clean state.
    relative_product: of `relative_gains`.
    excluded: int64 [S - 1], tokens with δx = 0 before the step, which have no ratio.
    small_gains: [S - 1], share of tokens whose ratio is below 1, of those that have one.
    cross: [S - 1], mean over tokens of 2⟨δx, Δ⟩, Δ the increment of δx in the step.
    own: [S - 1], mean over tokens of ‖Δ‖². The mean of ‖δx‖² grows by cross + own.
    cross_share: [S - 1], cross / (cross + own): near 0 where increments are independent of what is
      there. Below 0 or above 1 where the two differ in sign.
    accumulated_cross_share: Σ cross / Σ (cross + own) over all steps.
    persistence: [S], lag-1 correlation of log ‖δx‖ along a sequence, mean over sequences.
    mean_persistence: over the states where it is defined.
    soundness: largest relative error of the product of a token's ratios against ‖δx at the last
      state‖ / ‖δx at the first‖, over tokens with δx ≠ 0 at every state.
  """

  gains: np.ndarray
  product: float
  relative_gains: np.ndarray
  relative_product: float
  excluded: np.ndarray
  small_gains: np.ndarray
  cross: np.ndarray
  own: np.ndarray
  cross_share: np.ndarray
  accumulated_cross_share: float
  persistence: np.ndarray
  mean_persistence: float
  soundness: float


def disturbance_gain(clean: np.ndarray, disturbed: np.ndarray) -> Gain:
  """The gain of each step and what it is made of (route study, section 5).

  Args:
    clean, disturbed: floats [S, B, T, D], states of the two runs in order of depth, from the first
      one that the disturbance reaches.

  Raises:
    ValueError: shapes that do not fit, states that are NaN or infinite, a clean state of norm 0,
      or a state before the last that no token is disturbed in.
  """
  if np.ndim(clean) != 4 or np.shape(clean) != np.shape(disturbed) or len(clean) < 2:
    raise ValueError(
      "clean and disturbed must be [S, B, T, D] with two states or more, got "
      f"{np.shape(clean)} and {np.shape(disturbed)}."
    )
  size, scale, cross, own = _measure(clean, disturbed)
  moved = size[:-1] > 0
  for state, some in enumerate(moved.any(axis=(1, 2))):
    if not some:
      raise ValueError(f"no token is disturbed at state {state}, expected δx ≠ 0 in one or more.")

  ratios = _step_ratios(size)
  gains = np.nanmedian(ratios, axis=(1, 2))
  relative_gains = np.nanmedian(_step_ratios(size / scale), axis=(1, 2))
  persistence = np.array([_persistence(at_state) for at_state in size])
  return Gain(
    gains=gains,
    product=float(gains.prod()),
    relative_gains=relative_gains,
    relative_product=float(relative_gains.prod()),
    excluded=np.count_nonzero(~moved, axis=(1, 2)),
    small_gains=(ratios < 1).sum(axis=(1, 2)) / moved.sum(axis=(1, 2)),
    cross=cross,
    own=own,
    cross_share=_quotient(cross, cross + own),
    accumulated_cross_share=float(_quotient(cross.sum(), (cross + own).sum())),
    persistence=persistence,
    mean_persistence=_mean(persistence[~np.isnan(persistence)]),
    soundness=_soundness(size, ratios),
  )


def _measure(clean, disturbed):
  """‖δx‖ and ‖x‖ [S, B, T], means over tokens of 2⟨δx, Δ⟩ and ‖Δ‖² [S - 1]; one state at a time."""
  size, scale, cross, own = [], [], [], []
  before = None
  for clean_state, disturbed_state in zip(clean, disturbed):
    # In float64 the difference of two nearby states of any narrower dtype keeps all its bits.
    state = np.asarray(clean_state, np.float64)
    delta = np.asarray(disturbed_state, np.float64) - state
    size.append(np.linalg.norm(delta, axis=-1))
    scale.append(np.linalg.norm(state, axis=-1))
    if not np.isfinite([size[-1], scale[-1]]).all():
      raise ValueError(f"state {len(size) - 1} is NaN or infinite, expected finite values.")
    if not scale[-1].all():
      raise ValueError(f"clean state {len(size) - 1} has norm 0 at a token, expected more.")
    if before is not None:
      increment = delta - before
      cross.append(2 * (before * increment).sum(axis=-1).mean())
      own.append((increment**2).sum(axis=-1).mean())
    before = delta
  return tuple(np.array(part) for part in (size, scale, cross, own))


def _step_ratios(size: np.ndarray) -> np.ndarray:
  """[S - 1, B, T], after over before; NaN where nothing was there before."""
  return _quotient(size[1:], size[:-1])


def _persistence(size_BxT: np.ndarray) -> float:
  """Mean over sequences of the correlation of log size with that of the next token.

  Tokens of size 0 are left out; so are sequences with fewer than three pairs or without spread.
  """
  found = []
  for size in size_BxT:
    pairs = np.stack([size[:-1], size[1:]])
    pairs = np.log(pairs[:, (pairs > 0).all(axis=0)])
    if pairs.shape[1] >= 3 and np.ptp(pairs, axis=1).all():
      found.append(np.corrcoef(pairs)[0, 1])
  return _mean(found)


def _soundness(size: np.ndarray, ratios: np.ndarray) -> float:
  """Largest relative error of a token's product of ratios; NaN if none is disturbed throughout."""
  throughout = (size > 0).all(axis=0)
  if not throughout.any():
    return float("nan")
  end_to_end = size[-1, throughout] / size[0, throughout]
  return float(np.abs(ratios[:, throughout].prod(axis=0) / end_to_end - 1).max())


def _quotient(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
  """top / bottom, NaN where the bottom is zero."""
  return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom != 0)


def _mean(values) -> float:
  return float(np.mean(values)) if len(values) else float("nan")
