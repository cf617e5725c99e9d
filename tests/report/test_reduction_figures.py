"""Figures say what they were given: counts in the text of the SVG, equal bytes for equal input."""

import re

import numpy as np
import pytest

from moejax.report import figures, reduction_figures
from tests.report.drawn import assert_equal_bytes, texts

CURVES = {"A": [312, 97, 97, 14, 3, 1, 1, 1, 1, 1], "B": np.array([141, 88, 52])}
FLOWS = [
  (("0", "I would wait", "agrees"), 211),
  (("1", "I would wait", "agrees"), 17),
  (("1", "$5 & more\nor less, whatever the weather", "refuses"), 5),
  (("2", "", "refuses"), 2),
]
ROWS = [
  dict(scheme="B", axis="native", routes=192, tokens=153, total=193),
  dict(scheme="B", axis="canonical", routes=187, tokens=141, total=193),
  dict(scheme="C", axis="native", routes=0, tokens=0, total=191),
]
FIRST_CHANGE = np.array([[0, 4, 0], [311, 27, 2]])


def draw_ranks(path):
  reduction_figures.draw_rank_frequency(path, CURVES)


def draw_alluvial(path):
  reduction_figures.draw_alluvial(path, (["class", "text", "label"], FLOWS))


def draw_axes(path):
  reduction_figures.draw_axes(path, ROWS)


def draw_first_change(path):
  reduction_figures.draw_first_change(path, FIRST_CHANGE, layers=[4, 5], tokens=["he", "$a", "cat"])


@pytest.mark.parametrize("draw", [draw_ranks, draw_alluvial, draw_axes, draw_first_change])
def test_equal_input_gives_equal_bytes_whatever_the_users_settings(tmp_path, draw):
  assert_equal_bytes(draw, tmp_path)


def test_rank_frequency_writes_each_count_and_a_run_once(tmp_path):
  draw_ranks(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  for count in ("312", "14", "141", "88", "52", "1 ×5"):
    assert count in found
  assert found.count("97") == 2
  assert {"A: 528 in 10 basins", "B: 281 in 3 basins"} <= set(found)


def test_rank_frequency_is_logarithmic_only_beyond_a_decade(tmp_path):
  reduction_figures.draw_rank_frequency(tmp_path / "f", {"C": [31, 17]})
  assert "0" in texts(tmp_path / "f.svg")  # a linear axis starts at 0
  reduction_figures.draw_rank_frequency(tmp_path / "f", {"C": [310, 17]})
  assert "0" not in texts(tmp_path / "f.svg")


def test_alluvial_writes_nodes_with_counts_and_shortens_long_ones(tmp_path):
  draw_alluvial(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  for label in ("0 · 211", "1 · 22", "2 · 2", "I would wait · 228", "agrees · 228", "refuses · 7"):
    assert label in found
  assert "$5 & more↵or less, whatever… · 5" in found and "(blank) · 2" in found
  assert "heights are counts, 235 in all" in found


def test_alluvial_numbers_what_no_font_draws_and_keeps_it_in_the_metadata(tmp_path, monkeypatch):
  monkeypatch.setattr(figures, "CJK_FAMILIES", ())
  flows = [(("他说 yes 好", "支持"), 3), (("no\x07", "neutral"), 2)]
  reduction_figures.draw_alluvial(tmp_path / "f", (["text", "标签"], flows))
  found = texts(tmp_path / "f.svg")
  assert {"[1] yes [1] · 3", "[2] · 3", "no\ufffd · 2", "[stage 1] (2)"} <= set(found)
  svg = (tmp_path / "f.svg").read_text("utf-8")
  assert "[1] 他说 yes 好; [2] 支持" in svg
  assert "支持".encode() in (tmp_path / "f.png").read_bytes()


def test_alluvial_merges_what_a_page_cannot_hold(tmp_path):
  labels = ["yes", "no"]
  flows = [((f"c{i}", f"t{i % 7}", labels[i % 7 > 3]), 1 + (i % 7 == 0)) for i in range(77)]
  reduction_figures.draw_alluvial(tmp_path / "f", (["class", "text", "label"], flows), most=5)
  found = texts(tmp_path / "f.svg")
  counts = [re.fullmatch(r"(.*) · (\d+)", text) for text in found]
  counts = {match[1]: int(match[2]) for match in counts if match}
  assert counts["t0"] == counts["c0 and 10 more"] == 22 and counts["3 smaller"] == 33
  assert counts["yes"] + counts["no"] == 88 and sum(counts.values()) == 3 * 88
  assert {"class (77)", "text (7)", "label (2)"} <= set(found)


def test_axes_writes_counts_on_bars_and_totals_under_schemes(tmp_path):
  draw_axes(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  assert {"192", "153", "187", "141", "of 193", "of 191", "–", "routes", "tokens"} <= set(found)
  assert found.index("C") < found.index("B")


def test_first_change_writes_counts_up_to_200_cells(tmp_path):
  draw_first_change(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  assert {"0", "4", "311", "27", "2", "he", "$a", "branches, 344 in all"} <= set(found)
  for width, written in ((20, True), (21, False)):
    counts = np.full((10, width), 777)
    reduction_figures.draw_first_change(
      tmp_path / "f", counts, layers=range(10), tokens=range(width)
    )
    assert texts(tmp_path / "f.svg").count("777") >= 200 * written
    assert written or texts(tmp_path / "f.svg").count("777") <= 1  # the colour bar's


def test_first_change_draws_when_nothing_changes(tmp_path):
  reduction_figures.draw_first_change(tmp_path / "f", [[0]], layers=[0], tokens=["_"])
  assert "branches, 0 in all" in texts(tmp_path / "f.svg")


def row(**changes):
  return [ROWS[0] | changes]


ranks, axes = reduction_figures.draw_rank_frequency, reduction_figures.draw_axes
alluvial, first_change = reduction_figures.draw_alluvial, reduction_figures.draw_first_change


@pytest.mark.parametrize(
  "draw,message",
  [
    (lambda path: ranks(path, {}), "at least one curve"),
    (lambda path: ranks(path, {"A": []}), "curve 'A' needs counts by rank"),
    (lambda path: ranks(path, {"A": [1, 2]}), "fall with the rank"),
    (lambda path: ranks(path, {"A": [2, 0]}), "positive integer"),
    (lambda path: ranks(path, {"A": [1.5]}), "positive integer"),
    (lambda path: alluvial(path, ([], [])), "at least two stages and one branch"),
    (lambda path: alluvial(path, (["a", "b"], [])), "at least two stages and one branch"),
    (lambda path: alluvial(path, (["a", "b"], [(("x",), 1)])), "one node for each stage"),
    (lambda path: alluvial(path, (["a", "b"], [(("x", "y"), 0)])), "weight of at least 1"),
    (lambda path: axes(path, []), "at least one row"),
    (lambda path: axes(path, row(axis="other")), "on the axes"),
    (lambda path: axes(path, ROWS + row()), "one row for each scheme"),
    (lambda path: axes(path, row(tokens=194)), "between 0 and a total"),
    (lambda path: axes(path, row(total=0)), "between 0 and a total"),
    (lambda path: first_change(path, [[]], layers=[0], tokens=[]), "filled"),
    (lambda path: first_change(path, [[1]], layers=[0], tokens=[0, 1]), "does not fit"),
    (lambda path: first_change(path, [[-1]], layers=[0], tokens=[0]), "at least 0"),
    (lambda path: first_change(path, [[0.5]], layers=[0], tokens=[0]), "integer"),
  ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(tmp_path, draw, message):
  with pytest.raises(ValueError, match=message) as error:
    draw(tmp_path / "f")
  assert "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())
