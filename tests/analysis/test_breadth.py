"""Breadth: the paper's own stages, plain loops on random cohorts, and rows that are refused."""

import numpy as np
import pytest

from moejax.analysis import breadth
from moejax.analysis.breadth import Prompt, Row


def cohort(size: int = 50) -> list[Prompt]:
  """As the paper's: half English, every fifth a candidate."""
  return [
    Prompt(f"p{n}", "en" if n < size // 2 else "zh", "candidate" if n % 5 == 4 else "ordinary")
    for n in range(size)
  ]


def saved(prompts, first: dict[str, int], at: dict[int, list[str]]) -> list[Row]:
  """Rows of the prompts that each horizon's file holds; `first` is where they separate."""
  return [
    Row(name, horizon, horizon >= first.get(name, 10**9)) for horizon in at for name in at[horizon]
  ]


def test_the_stages_of_the_paper():
  # Appendix B.3: 12, 24 and 36 of 50; the 32-token file repeats 5 prompts separated at 16.
  prompts = cohort()
  names = [prompt.id for prompt in prompts]
  # By 8 tokens 6 English and 6 Chinese prompts, 9 ordinary and 3 candidates among them.
  early = ["p0", "p1", "p2", "p3", "p4", "p9", "p25", "p26", "p27", "p28", "p30", "p34"]
  rest = [name for name in names if name not in early]
  first = {name: 8 for name in early}
  first |= {name: 16 for name in rest[:12]} | {name: 32 for name in rest[12:24]}
  at = {8: names, 16: rest, 32: rest[12:] + rest[3:8]}
  stages = breadth.stages(prompts, saved(prompts, first, at))
  rows = breadth.counts(stages)
  assert [row[3:] for row in rows if row.by == "all"] == [
    (50, 50, 12, 12, 12, 0),
    (50, 38, 12, 24, 12, 0),
    (50, 26, 12, 36, 17, 5),
  ]
  at_8 = {row.group: (row.cumulative, row.prompts) for row in rows if row.horizon == 8}
  assert at_8 == dict(all=(12, 50), en=(6, 25), zh=(6, 25), ordinary=(9, 40), candidate=(3, 10))
  assert [prompt.id for prompt in stages[2].repeated] == rest[3:8]
  assert len(stages[2].survivors) == 14


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_plain_loops(seed):
  rng = np.random.default_rng(seed)
  prompts = [
    Prompt(str(n), str(rng.choice(["de", "en", "zh"])), str(rng.choice(breadth.KINDS)))
    for n in range(23)
  ]
  horizons = (2, 5, 11, 17)
  first = {prompt.id: int(rng.choice([2, 5, 11, 17, 99])) for prompt in prompts}
  rows = [
    Row(name, horizon, np.bool_(first[name] <= horizon))
    for horizon in horizons
    for name in first
    if first[name] >= horizon or rng.random() < 0.4
  ]
  rows = [rows[index] for index in rng.permutation(len(rows))]
  seen = 0
  for row in breadth.counts(breadth.stages(prompts, rows, horizons)):
    inside = [
      prompt.id for prompt in prompts if row.by == "all" or getattr(prompt, row.by) == row.group
    ]
    at = {name for name, horizon, _ in rows if horizon == row.horizon}
    assert row.prompts == len(inside)
    assert row.at_risk == sum(first[name] >= row.horizon for name in inside)
    assert row.new == sum(first[name] == row.horizon for name in inside)
    assert row.cumulative == sum(first[name] <= row.horizon for name in inside)
    assert row.repeated == sum(first[name] < row.horizon and name in at for name in inside)
    assert row.saved == sum(first[name] <= row.horizon and name in at for name in inside)
    seen += row.repeated
  assert seen


def test_a_study_under_way_says_who_goes_on():
  prompts = cohort(4)
  rows = saved(prompts, {"p1": 8, "p2": 16}, {8: ["p0", "p1", "p2", "p3"]})
  (stage,) = breadth.stages(prompts, rows, horizons=(8,))
  assert [prompt.id for prompt in stage.survivors] == ["p0", "p2", "p3"]
  rows += saved(prompts, {"p1": 8, "p2": 16}, {16: ["p0", "p2", "p3"]})
  both = breadth.stages(prompts, rows, horizons=(8, 16))
  assert both[0] == stage
  assert [prompt.id for prompt in both[1].new] == ["p2"]


def test_nobody_may_be_left():
  prompts = cohort(3)
  names = [prompt.id for prompt in prompts]
  stages = breadth.stages(prompts, saved(prompts, dict.fromkeys(names, 8), {8: names}))
  assert [row.at_risk for row in breadth.counts(stages) if row.by == "all"] == [3, 0, 0]
  assert [row.cumulative for row in breadth.counts(stages) if row.by == "all"] == [3, 3, 3]


def good_rows() -> list[Row]:
  names = ["p0", "p1", "p2"]
  return saved(cohort(3), {"p1": 8}, {8: names, 16: ["p0", "p2"], 32: ["p0", "p1", "p2"]})


def replaced(at: int, *row) -> list[Row]:
  rows = good_rows()
  rows[at : at + 1] = [Row(*row)] if row else []
  return rows


@pytest.mark.parametrize(
  "rows,message",
  [
    ([*good_rows(), Row("p2", 16, False)], "prompt 'p2' has two rows at 16 tokens"),
    ([*good_rows(), Row("p1", 32, True)], "prompt 'p1' has two rows at 32 tokens"),
    ([*good_rows(), Row("p7", 16, False)], "a row has the unknown prompt 'p7'"),
    ([*good_rows(), Row("p2", 64, True)], r"'p2' has a row at 64 tokens, .* \(8, 16, 32\)"),
    (replaced(0), "prompt 'p0', at risk at 8 tokens, has no row"),
    (replaced(4), "prompt 'p2', at risk at 16 tokens, has no row"),
    (replaced(6, "p1", 32, False), "'p1' is not separated within 32 tokens, but was within fewer"),
    (replaced(3, "p0", 16, "False"), "'p0' at 16 tokens: separated is 'False', expected a bool"),
  ],
)
def test_bad_rows_are_refused(rows, message):
  assert len(breadth.stages(cohort(3), good_rows())) == 3
  with pytest.raises(ValueError, match=message):
    breadth.stages(cohort(3), rows)


@pytest.mark.parametrize(
  "prompts,horizons,message",
  [
    ([*cohort(3), Prompt("p1", "en", "ordinary")], (8,), "prompt 'p1' is listed twice"),
    ([Prompt("p0", "en", "odd")], (8,), "prompt 'p0' is 'odd', expected one of"),
    (cohort(3), (8, 32, 16), r"the horizons \(8, 32, 16\) do not ascend"),
    (cohort(3), (8, 8), r"the horizons \(8, 8\) do not ascend"),
  ],
)
def test_bad_cohorts_are_refused(prompts, horizons, message):
  with pytest.raises(ValueError, match=message):
    breadth.stages(prompts, good_rows(), horizons)
