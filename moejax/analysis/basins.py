"""Basins: the branches of a sweep that go on with the same token ids."""

from collections.abc import Sequence
import dataclasses
import fractions
import hashlib
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Basins:
  """N basins of P branches, numbered from 0 by falling order count, then by lowest branch.

  Attributes:
    labels: int64 [P], the basin of each branch.
    weights: int64 [P], how many orders each branch stands for.
    classes: int64 [P], the structural class of each branch; or None.
    order_counts: int64 [N], volume in orders.
    class_counts: int64 [N], volume in classes; or None. A class that lies in two basins, as none
      should, counts in both.
    representatives: int64 [N], the lowest branch of each.
  """

  labels: np.ndarray
  weights: np.ndarray
  classes: np.ndarray | None
  order_counts: np.ndarray
  class_counts: np.ndarray | None
  representatives: np.ndarray


class Rank(NamedTuple):
  """A row of the rank-frequency table; shares are of all orders and of all classes."""

  rank: int
  order_count: int
  order_share: fractions.Fraction
  class_count: int | None
  class_share: fractions.Fraction | None


def basins(
  tokens: np.ndarray,
  horizon: int,
  *,
  weights: np.ndarray | None = None,
  classes: np.ndarray | None = None,
) -> Basins:
  """The basins of a sweep within the first tokens (paper, section 3.2; token ids decide).

  Args:
    tokens: integers [P, T], emitted by each branch.
    horizon: how many of them count, 1 .. T.
    weights: positive integers [P], how many orders each branch stands for: 2 where only class
      representatives of scheme B were run. One each if not given.
    classes: integers [P], structural class ids (`moejax.combine.structural_classes`).

  Raises:
    ValueError: another shape or dtype, no branches, a negative id, a horizon or weight out of
      range.
  """
  tokens = _check_ids("tokens", tokens, 2)
  num_branches, num_tokens = tokens.shape
  if not 1 <= horizon <= num_tokens:
    raise ValueError(f"the horizon is {horizon}, expected 1 to {num_tokens}, the tokens there are.")
  if weights is None:
    weights = np.ones(num_branches, np.int64)
  weights = _check_ids("weights", weights, 1, num_branches)
  if weights.min() < 1:
    raise ValueError(f"branch {weights.argmin()} has weight {weights.min()}, expected at least 1.")
  if classes is not None:
    classes = _check_ids("classes", classes, 1, num_branches)

  _, lowest, found = np.unique(tokens[:, :horizon], axis=0, return_index=True, return_inverse=True)
  found = found.reshape(-1)  # NumPy 2.0 keeps the axis.
  volumes = np.zeros(len(lowest), np.int64)
  np.add.at(volumes, found, weights)
  order = np.lexsort((lowest, -volumes))
  number = np.empty_like(order)
  number[order] = np.arange(len(order))
  labels = number[found]
  class_counts = None
  if classes is not None:
    there = np.unique(np.stack([labels, classes]), axis=1)[0]
    class_counts = np.bincount(there, minlength=len(order))
  return Basins(labels, weights, classes, volumes[order], class_counts, lowest[order])


def rank_frequency(found: Basins) -> list[Rank]:
  """Basins by falling order count, with exact shares; class columns are None without classes."""
  num_orders = int(found.order_counts.sum())
  rows = []
  for basin, order_count in enumerate(found.order_counts.tolist()):
    class_count = class_share = None
    if found.classes is not None:
      class_count = int(found.class_counts[basin])
      class_share = fractions.Fraction(class_count, len(np.unique(found.classes)))
    share = fractions.Fraction(order_count, num_orders)
    rows.append(Rank(basin + 1, order_count, share, class_count, class_share))
  return rows


def check_scheme_b(found: Basins) -> None:
  """Checks that order-weighted and class-weighted shares coincide, and why (paper, section 2.6).

  Under scheme B each class holds two orders with the same bits. If each class has weight 2 and
  lies in one basin, a basin of c of n classes holds 2c of 2n orders: the shares are equal.

  Raises:
    ValueError: no classes are given; or, naming the first one, a class with another number of
      orders or in more than one basin.
  """
  if found.classes is None:
    raise ValueError("scheme B: the basins were made without classes.")
  for class_id in np.unique(found.classes):
    member = found.classes == class_id
    num_orders, where = found.weights[member].sum(), np.unique(found.labels[member])
    if len(where) > 1:
      raise ValueError(
        f"scheme B: class {class_id} lies in basins {where.tolist()}, expected one, since its "
        "orders have the same bits."
      )
    if num_orders != 2:
      raise ValueError(f"scheme B: class {class_id} holds {num_orders} orders, expected 2.")


def tokens_sha256(ids: Sequence[int] | np.ndarray) -> str:
  """SHA-256, in hex, of a token sequence: of its decimal ids joined by commas.

  Raises:
    ValueError: not integers [T], none at all, or a negative id.
  """
  ids = _check_ids("ids", ids, 1)
  return hashlib.sha256(",".join(map(str, ids.tolist())).encode()).hexdigest()


def _check_ids(name: str, ids, rank: int, length: int | None = None) -> np.ndarray:
  """int64 of a rank, not empty and nowhere negative, or one clear sentence."""
  ids = np.asarray(ids)
  expected = ("[T]", "[P, T]")[rank - 1] if length is None else f"[{length}], one for each branch"
  if (
    ids.ndim != rank
    or not np.issubdtype(ids.dtype, np.integer)
    or not ids.size
    or length not in (None, len(ids))
  ):
    raise ValueError(f"{name} must be integers {expected}, got {ids.dtype} {ids.shape}.")
  if ids.min() < 0:
    raise ValueError(f"{name} go down to {ids.min()}, expected 0 or more.")
  return ids.astype(np.int64)
