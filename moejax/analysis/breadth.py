"""Staged breadth: how many prompts a branch has separated from native within growing horizons.

At each horizon only survivors go on, so the stages are one cohort that shrinks, not several.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

HORIZONS = (8, 16, 32)  # emitted tokens
KINDS = ("ordinary", "candidate")


class Prompt(NamedTuple):
  """A prompt of the cohort; the id is what rows are joined by, `kind` one of `KINDS`."""

  id: str
  language: str
  kind: str


class Row(NamedTuple):
  """Whether a prompt's branch differs from native within `horizon` tokens."""

  prompt: str
  horizon: int
  separated: bool


@dataclasses.dataclass(frozen=True)
class Stage:
  """One horizon.

  Attributes:
    horizon: in emitted tokens.
    at_risk: prompts not separated at any earlier horizon.
    new: those of them separated at this one.
    repeated: prompts that have a row here though they were separated earlier: no new events.
  """

  horizon: int
  at_risk: tuple[Prompt, ...]
  new: tuple[Prompt, ...]
  repeated: tuple[Prompt, ...]

  @property
  def survivors(self) -> tuple[Prompt, ...]:
    """At risk at the next horizon."""
    return tuple(prompt for prompt in self.at_risk if prompt not in self.new)


class Count(NamedTuple):
  """A row of the summary: one horizon and one group of prompts (`by`, `group`).

  `saved` is how many saved rows say "separated": `new` and `repeated` together.
  """

  horizon: int
  by: str
  group: str
  prompts: int
  at_risk: int
  new: int
  cumulative: int
  saved: int
  repeated: int


def stages(
  prompts: Sequence[Prompt], rows: Iterable[Row], horizons: Sequence[int] = HORIZONS
) -> list[Stage]:
  """Follows a cohort through its horizons (paper, sections 3.5 and B.3).

  Args:
    prompts: the cohort.
    rows: in any order; at least one for each prompt at risk at each horizon. Rows of prompts that
      were separated earlier are set aside.
    horizons: ascending; the first few while a study is under way.

  Raises:
    ValueError: a prompt listed twice or of an unknown kind; horizons that do not ascend; a row of
      an unknown prompt or horizon, given twice, or whose `separated` is not a bool; a prompt at
      risk without a row; a prompt separated early but not later.
  """
  by_id = {}
  for prompt in prompts:
    if prompt.id in by_id:
      raise ValueError(f"breadth: prompt {prompt.id!r} is listed twice.")
    if prompt.kind not in KINDS:
      raise ValueError(
        f"breadth: prompt {prompt.id!r} is {prompt.kind!r}, expected one of {KINDS}."
      )
    by_id[prompt.id] = prompt
  if any(low >= high for low, high in itertools.pairwise(horizons)):
    raise ValueError(f"breadth: the horizons {tuple(horizons)} do not ascend.")
  separated = _index(by_id, rows, horizons)

  result, at_risk, before = [], tuple(prompts), set()
  for horizon in horizons:
    for prompt in at_risk:
      if (prompt.id, horizon) not in separated:
        raise ValueError(f"breadth: prompt {prompt.id!r}, at risk at {horizon} tokens, has no row.")
    repeated = tuple(p for p in prompts if p in before and (p.id, horizon) in separated)
    for prompt in repeated:
      if not separated[prompt.id, horizon]:
        raise ValueError(
          f"breadth: prompt {prompt.id!r} is not separated within {horizon} tokens, but was within "
          "fewer."
        )
    new = tuple(prompt for prompt in at_risk if separated[prompt.id, horizon])
    result.append(Stage(horizon, at_risk, new, repeated))
    at_risk, before = result[-1].survivors, before.union(new)
  return result


def counts(followed: Sequence[Stage]) -> list[Count]:
  """Counts per horizon: of all prompts, then by language, then by kind.

  Cumulative counts are of prompts, each counted once, out of `prompts` of the group at the start.
  """
  cohort = followed[0].at_risk
  languages = sorted({prompt.language for prompt in cohort})
  groups = [("all", "all")]
  groups += [("language", language) for language in languages]
  groups += [("kind", kind) for kind in KINDS]
  rows = []
  for last, stage in enumerate(followed):
    events = {prompt for earlier in followed[: last + 1] for prompt in earlier.new}
    for by, group in groups:
      prompts, at_risk, new, cumulative, repeated = (
        sum(by == "all" or getattr(prompt, by) == group for prompt in some)
        for some in (cohort, stage.at_risk, stage.new, events, stage.repeated)
      )
      rows.append(
        Count(stage.horizon, by, group, prompts, at_risk, new, cumulative, new + repeated, repeated)
      )
  return rows


def _index(by_id, rows: Iterable[Row], horizons: Sequence[int]) -> dict[tuple[str, int], bool]:
  """`separated` by (prompt id, horizon); refuses rows that cannot be joined."""
  separated = {}
  for row in rows:
    at = (row.prompt, row.horizon)
    if row.prompt not in by_id:
      raise ValueError(f"breadth: a row has the unknown prompt {row.prompt!r}.")
    if row.horizon not in horizons:
      raise ValueError(
        f"breadth: prompt {row.prompt!r} has a row at {row.horizon!r} tokens, expected one of "
        f"{tuple(horizons)}."
      )
    if at in separated:
      raise ValueError(f"breadth: prompt {row.prompt!r} has two rows at {row.horizon} tokens.")
    if not isinstance(row.separated, bool | np.bool_):
      raise ValueError(
        f"breadth: prompt {row.prompt!r} at {row.horizon} tokens: separated is {row.separated!r}, "
        "expected a bool."
      )
    separated[at] = bool(row.separated)
  return separated
