"""Figures say what they were given: numbers in the text of the SVG, equal bytes for equal input."""

import numpy as np
import pytest

from moejax.report import route_figures
from tests.report.drawn import assert_equal_bytes, texts

NUMBERS = dict(
  cc=2.71828,
  ct=2.7315,
  qp=2.7764,
  qf=2.79398,
  route_pure=(0.0132, 0.0100, 0.0166),
  route_forward=(0.0175, -0.0002, 0.0239),
  compute=(0, 0, 0),
  compute_transplanted=(0.0625, 0.0521, 0.0733),
  interaction=(3e-7, -1e-6, 2e-6),
  rmf=(0.231, 0.151, 0.3224),
)


def point(label, dose, share, half=0.1, interpretable=True):
  return dict(
    label=label,
    dose=dose,
    excess_compute=0.1 * dose * (1 - share),
    route_forward=0.1 * dose * share,
    rmf=share,
    rmf_low=share - half,
    rmf_high=share + half,
    interpretable=interpretable,
  )


POINTS = [point("2 bits", 11.7, 0.54), point("4 bits", 1.0, 0.31), point("3 $bits", 5.4, 0.58)]
REAL = [point("int4", 0.11, 0.19, half=0.3), point("int3", 0.93, 0.13)]
ROWS = [
  dict(name="flip", auc=0.81, auc_low=0.798, auc_high=0.8224, paper=0.772),
  dict(name="harm given $flip", auc=0.496, auc_low=0.47, auc_high=0.52, paper=None),
  dict(name="boosted trees", auc=np.float64(0.6), auc_low=0.55, auc_high=0.64),
]
BY_LAYER = [dict(layer=i + 1, pin_only=0.001 * (i - 2), pin_others=0.017) for i in range(7)]
SHARES = {"jump": 0.45, "nonlocal": 0.552, "pure_flux": -0.002}


def fraction(disturbance, model, rmf, interpretable=True):
  low, high = (None, None) if rmf is None else (rmf - 0.05, rmf + 0.0704)
  return dict(
    disturbance=disturbance,
    model=model,
    rmf=rmf,
    rmf_low=low,
    rmf_high=high,
    interpretable=interpretable,
  )


HEADLINE = [
  fraction("KV, 4 bits", "olmoe", 0.31),
  fraction("INT8", "olmoe", None, interpretable=False),
  fraction("INT8", "qwen3", -40.0, interpretable=False),
  fraction("KV, 4 bits", "qwen3", 0.42),
]


def draw_graph(path):
  route_figures.draw_causal_graph(path, "olmoe, KV at 4 bits", NUMBERS)


def draw_doses(path):
  route_figures.draw_dose_curve(path, POINTS, REAL)


def draw_aucs(path):
  route_figures.draw_auc_panel(path, ROWS)


def draw_attribution(path):
  route_figures.draw_attribution(path, BY_LAYER, SHARES)


def draw_headline(path):
  route_figures.draw_headline(path, HEADLINE)


DRAW = [draw_graph, draw_doses, draw_aucs, draw_attribution, draw_headline]


@pytest.mark.parametrize("draw", DRAW)
def test_equal_input_gives_equal_bytes_whatever_the_users_settings(tmp_path, draw):
  assert_equal_bytes(draw, tmp_path)


@pytest.mark.parametrize("draw", DRAW)
def test_no_text_leaves_the_page(tmp_path, draw, monkeypatch):
  kept = []
  monkeypatch.setattr(
    route_figures.figures, "save_figure", lambda figure, path: kept.append(figure)
  )
  draw(tmp_path / "f")
  (figure,) = kept
  figure.draw_without_rendering()
  left, bottom, right, top = figure.get_tightbbox().extents  # of all that is drawn, in inches
  width, height = figure.get_size_inches()
  assert left >= 0 and bottom >= 0 and right <= width and top <= height


def test_the_graph_writes_losses_contrasts_and_the_caption(tmp_path):
  draw_graph(tmp_path / "f")
  found = " | ".join(texts(tmp_path / "f.svg"))
  for text in (
    *("olmoe, KV at 4 bits", "2.7183 nats", "2.7315 nats", "2.7764 nats", "2.7940 nats"),
    *("route pure", "+0.0132 [+0.0100, +0.0166]", "route forward", "+0.018 [+0.000, +0.024]"),
    *("compute, transplanted route", "+0.06", "0 | [0, 0]"),
    "interaction = route forward − route pure = +0.0000003 [−0.0000010, +0.0000020] nats",
    "RMF = route forward / total = 0.231 [0.151, 0.322]",
  ):
    assert text in found, text


def test_a_graph_without_an_rmf_says_so(tmp_path):
  route_figures.draw_causal_graph(tmp_path / "f", "cost $5 & $6", NUMBERS | dict(rmf=None))
  found = texts(tmp_path / "f.svg")
  assert "cost $5 & $6" in found
  assert "RMF = route forward / total = NOT INTERPRETABLE" in found


def test_doses_are_labelled_in_order_and_sources_told_apart(tmp_path):
  draw_doses(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  labels = ("int4", "int3", "4 bits", "3 $bits", "2 bits")  # by rising dose
  assert [text for text in found if text in labels] == list(labels)
  assert {"direct", "routed", "RMF", "simulated", "real kernel"} <= set(found)
  assert not {"not interpretable", "not positive"} & set(found)
  route_figures.draw_dose_curve(tmp_path / "f", POINTS)
  assert not {"simulated", "real kernel"} & set(texts(tmp_path / "f.svg"))


def test_doses_that_no_logarithm_holds_are_said(tmp_path):
  odd = [
    point("8 bits", 0.01, -0.5, half=9.0, interpretable=False),
    point("7 bits", -0.02, 0.3, interpretable=False),
    POINTS[0] | dict(label="6 bits", dose=0, rmf=None, rmf_low=np.nan, interpretable=False),
  ]
  route_figures.draw_dose_curve(tmp_path / "f", POINTS + odd)
  found = texts(tmp_path / "f.svg")
  assert "not drawn, the dose is not positive: 7 bits, 6 bits" in found
  assert {"8 bits", "not interpretable", "not positive"} <= set(found)


def test_one_dose_still_has_a_number_on_its_axis(tmp_path):
  route_figures.draw_dose_curve(tmp_path / "f", [point("4 bits", 0.0003, 0.31)])
  assert {"0.0001", "0.001"} & set(texts(tmp_path / "f.svg"))


@pytest.mark.parametrize("seed", range(5))
def test_labels_keep_their_order_and_their_room_and_move_no_farther_than_they_must(seed):
  places = np.sort(np.random.default_rng(seed).uniform(0, 90, size=7))
  moved = route_figures._apart(places, 11.0)
  assert (np.diff(moved) >= 11.0 - 1e-9).all()
  assert moved.mean() == pytest.approx(places.mean())
  np.testing.assert_allclose(route_figures._apart(moved, 11.0), moved)


def test_aucs_are_written_with_their_intervals(tmp_path):
  draw_aucs(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  assert {"0.810 [0.798, 0.822]", "0.600 [0.550, 0.640]", "harm given $flip"} <= set(found)
  assert {"excludes 0.5", "covers 0.5", "0.5 ± 0.05", "paper"} <= set(found)
  assert found.index("flip") < found.index("harm given $flip") < found.index("boosted trees")
  route_figures.draw_auc_panel(tmp_path / "f", ROWS[1:])
  assert "paper" not in texts(tmp_path / "f.svg")


def test_attribution_writes_signed_shares_and_layers(tmp_path):
  draw_attribution(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  assert {"+0.450", "+0.552", "−0.002", "jump", "nonlocal", "pure flux", "1", "7"} <= set(found)
  assert {"only this layer pinned", "all but this layer pinned"} <= set(found)
  for number in (1, 61):
    many = [dict(layer=i, pin_only=0.0, pin_others=0.0) for i in range(number)]
    route_figures.draw_attribution(tmp_path / "f", many, SHARES)
    found = texts(tmp_path / "f.svg")
    assert "0" in found and ("60" in found) == (number == 61)


def test_the_headline_greys_what_is_not_interpretable_and_says_it(tmp_path):
  draw_headline(tmp_path / "f")
  found = texts(tmp_path / "f.svg")
  assert {"0.310 [0.260, 0.380]", "0.420 [0.370, 0.490]"} <= set(found)
  assert found.count("NOT INTERPRETABLE") == 2 and not any("40" in text for text in found)
  drawn = [text for text in found if text in ("KV, 4 bits", "INT8", "olmoe", "qwen3")]
  assert drawn == ["KV, 4 bits", "olmoe", "qwen3", "INT8", "olmoe", "qwen3"]
  greys = (tmp_path / "f.svg").read_text("utf-8").lower().count("fill: #8a8a8a")
  assert greys == 4  # two models and two verdicts


def test_a_headline_of_nothing_interpretable_is_drawn(tmp_path):
  route_figures.draw_headline(tmp_path / "f", HEADLINE[1:3])
  assert texts(tmp_path / "f.svg").count("NOT INTERPRETABLE") == 2


graph, doses = route_figures.draw_causal_graph, route_figures.draw_dose_curve
aucs, headline = route_figures.draw_auc_panel, route_figures.draw_headline
attribution = route_figures.draw_attribution


@pytest.mark.parametrize(
  "draw,message",
  [
    (lambda path: graph(path, "", {}), r"needs the numbers \['cc', 'ct'"),
    (lambda path: graph(path, "", NUMBERS | dict(qp=np.nan)), "losses must be finite"),
    (lambda path: graph(path, "", NUMBERS | dict(compute=(1, 2, 0))), "compute needs a finite"),
    (lambda path: graph(path, "", NUMBERS | dict(rmf=(1, 0, np.inf))), "rmf needs a finite"),
    (lambda path: doses(path, []), "positive dose and damage, got none"),
    (lambda path: doses(path, [point("8", -1.0, 0.3)]), "positive dose and damage, got none"),
    (lambda path: doses(path, [point("8", np.inf, 0.3)]), "point '8' needs a finite dose"),
    (lambda path: doses(path, [POINTS[0] | dict(dose=None)]), "'2 bits' needs a finite dose"),
    (
      lambda path: doses(path, [POINTS[0] | dict(rmf=None)]),
      "RMF of the point '2 bits' needs a finite",
    ),
    (lambda path: doses(path, POINTS, [REAL[0] | dict(rmf_low=9)]), "'int4' needs a finite"),
    (lambda path: aucs(path, []), "at least one row"),
    (lambda path: aucs(path, [ROWS[0] | dict(auc=None)]), "flip needs a finite value"),
    (lambda path: aucs(path, [ROWS[0] | dict(auc_high=0.7)]), "flip needs a finite value"),
    (lambda path: aucs(path, [ROWS[0] | dict(auc_high=1.01)]), "between 0 and 1"),
    (lambda path: attribution(path, [], SHARES), "at least one layer and the shares"),
    (lambda path: attribution(path, BY_LAYER, {}), "at least one layer and the shares"),
    (lambda path: attribution(path, BY_LAYER, dict(jump=1.0)), "must add up to 1"),
    (lambda path: attribution(path, BY_LAYER, SHARES | dict(jump=0.6)), "must add up to 1"),
    (lambda path: attribution(path, BY_LAYER, SHARES | dict(jump=np.nan)), "must add up to 1"),
    (lambda path: attribution(path, BY_LAYER, SHARES | dict(jump=None)), "must add up to 1"),
    (lambda path: attribution(path, BY_LAYER * 2, SHARES), "one row for each layer"),
    (
      lambda path: attribution(path, [dict(layer=0, pin_only=np.nan, pin_others=0)], SHARES),
      "must be finite",
    ),
    (lambda path: headline(path, []), "at least one row"),
    (lambda path: headline(path, HEADLINE * 2), "one row for each disturbance and model"),
    (
      lambda path: headline(path, [HEADLINE[1] | dict(interpretable=True)]),
      "RMF of olmoe under INT8 needs a finite",
    ),
  ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(tmp_path, draw, message):
  with pytest.raises(ValueError, match=message) as error:
    draw(tmp_path / "f")
  assert "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())
