"""The route study on tiny models: what its tables say, from runs made here, and what it refuses.

The default tests run OLMoE; the whole study of every family is `slow`.
"""

import dataclasses
import functools
import json
import math
import pathlib
import tempfile

import numpy as np
import pytest
from scipy import stats

from experiments.route import (
  all_models,
  attribution,
  detection,
  disturbance_gain,
  dose_sweep,
  exchange_rate,
  flag_swap,
  four_run,
  held_out,
  policies,
  process_replication,
  real_kernel,
  reference_fidelity,
  run_all,
  task_level,
)
from experiments.route import (
  study as studies,
)
from experiments.route.measure import contrasts, share_of
import moejax
from moejax import data
from moejax.analysis.bootstrap import cluster_bootstrap, Estimate, mean
from moejax.analysis.detection import auc
from moejax.inference import Condition, KvQuantization, pad, run_routed, WeightQuantization
from moejax.models import Mode
from moejax.models.families import config_from_hf
from moejax.report import route_tables as tables
from tests.experiments import tiny_model
from tests.models import tiny
from tests.oracles import assert_same_bits

_FOLDER = tempfile.TemporaryDirectory()
OPTIONS = dict(num_sequences=6, length=40, prefill=12)


def study(family: str, name: str, **more) -> studies.Study:
  options = dict(text=studies.read_text(None, "calibration"), quiet=True) | OPTIONS | more
  model = moejax.load(tiny_model.directory(family))
  return studies.Study(model, Mode(), pathlib.Path(_FOLDER.name) / name, **options)


@functools.cache
def olmoe() -> studies.Study:
  """Two bits: a tiny random model has little to lose."""
  return study("olmoe", "olmoe", disturbance=KvQuantization(2))


@functools.cache
def four_bits() -> studies.Study:
  return study("olmoe", "four-bits")


def ran(protocol, table):
  """The rows of a protocol, run once."""
  if not table.path(olmoe().out).is_file():
    protocol.run(olmoe())
  return table.read(olmoe().out)


def test_windows_are_nested_and_rows_say_what_they_are_of():
  made, more = olmoe(), dataclasses.replace(olmoe(), num_sequences=9)
  assert (more.tokens[:6] == made.tokens).all()
  (row, *_) = ran(reference_fidelity, tables.REFERENCE_FIDELITY)
  assert (row["disturbance"], row["sequences"], row["tokens"]) == ("kv2", 6, 6 * 28)
  assert (row["split"], row["data_sha256"]) == ("calibration", made.text.sha256)
  assert row["weights_sha256"] == made.model.sha256 and "bootstrap of sequences" in row["interval"]


def test_the_columns_of_four_runs_are_those_of_the_runs():
  four = olmoe().four
  row, again = olmoe().contrasts(olmoe().disturbance)
  assert again is four and row["control"] == 0 and row["control_sequences"] == 6
  nll = {name: getattr(four, name).nll.astype(np.float64) for name in ("cc", "qp", "qf", "ct")}
  assert row["excess_total"] == pytest.approx((nll["qf"] - nll["cc"]).mean(), rel=1e-12)
  assert row["route_forward"] == pytest.approx((nll["qf"] - nll["qp"]).mean(), rel=1e-12)
  parts = row["excess_compute"] + row["route_pure"] + row["interaction"]
  assert parts == pytest.approx(row["excess_total"], abs=1e-12)
  flips = (four.cc.ids != four.qf.ids).any(axis=-1)[:, :, 11:]
  assert row["flip_rate"] == flips[-1].mean() and row["flip_rate_any"] == flips.any(axis=0).mean()
  low, high = row["excess_total_low"], row["excess_total_high"]
  assert row["interpretable"] == (low > 0) and low <= row["excess_total"] <= high


def test_a_fraction_is_a_ratio_of_sums_and_only_of_a_positive_denominator():
  denominator = np.array([[1.0, 1.0], [3.0, 1.0], [2.0, 4.0]])
  numerator = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
  found = share_of(numerator, denominator, 0)
  assert found.value == 3 / 12 != np.mean(numerator.sum(1) / denominator.sum(1))
  assert share_of(numerator, denominator - 3, 0) is None
  assert share_of(numerator, -denominator, 0) is None


@functools.cache
def flags_of(four):
  return four.flips()[olmoe().routers]


def test_masks_partition_the_harm():
  rows = {row["mask"]: row for row in ran(attribution, tables.ATTRIBUTION)}
  harm, flips = olmoe().four.route_forward, flags_of(olmoe().four)
  jump, any_flip = flips[-1], flips.any(axis=0)
  wanted = dict(jump=jump, nonlocal_=~jump & any_flip, pure_flux=~any_flip)
  for name, mask in wanted.items():
    row = rows[name.rstrip("_")]
    assert row["masked_tokens"] == mask.sum()
    assert row["harm"] == pytest.approx(harm[mask].sum(), abs=1e-9)
  assert math.fsum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-12)
  tax = {row["scope"]: row for row in tables.TAX.read(olmoe().out)}["any layer"]
  assert tax["net"] == pytest.approx(harm[any_flip].sum(), abs=1e-9)


def test_layers_are_runs_with_one_layer_pinned():
  rows = ran(attribution, tables.LAYERS)
  assert [row["layer"] for row in rows] == olmoe().routers == [0, 1]
  four = olmoe().four
  # With two layers, pinning all but one is pinning the other.
  assert rows[0]["pin_only"] == rows[1]["pin_others"]
  assert rows[0]["transplant_others"] == rows[1]["transplant_only"]
  only = np.array([False, True])[:, None, None]
  qf = run_routed(olmoe().model, olmoe().tokens, olmoe().disturbed, four.cc.pins(only), prefill=12)
  want = (four.qf.nll.astype(np.float64) - qf.nll).mean()
  assert rows[1]["pin_only"] == pytest.approx(want, rel=1e-12)


def test_detection_is_of_the_disturbed_margin_and_its_mixture_adds_up():
  rows = {row["question"]: row for row in ran(detection, tables.DETECTION)}
  four, layer = olmoe().four, olmoe().routers[-1]
  score, flipped = -four.qf.margins[layer], four.flips()[layer]
  harmful = four.route_forward > 0
  assert rows["flip"]["auc"] == pytest.approx(auc(score.ravel(), flipped.ravel()), abs=1e-12)
  assert rows["harm"]["auc"] == pytest.approx(auc(score[flipped], harmful[flipped]), abs=1e-12)
  parts = [rows[f"benefit/{group}"] for group in ("no_flip", "harmless_flip")]
  mixed = sum(part["weight"] * part["auc"] for part in parts)
  assert rows["benefit"]["auc"] == pytest.approx(mixed, abs=1e-12)
  assert rows["benefit"]["residual"] <= 1e-12
  probes = tables.PROBES.read(olmoe().out)
  assert {row["features"] for row in probes} == {5, 25, 10}
  assert {row["flips"] for row in probes} == {flipped.sum()}


def test_policies_pin_as_many_tokens_as_the_oracle_and_the_full_mask_is_qp():
  rows = {row["policy"]: row for row in ran(policies, tables.POLICIES)}
  assert set(rows) == {"oracle", "random", "margin"}
  assert len({row["pinned_tokens"] for row in rows.values()}) == 1
  four = olmoe().four
  every = np.ones(four.qf.nll.shape, bool)
  position = np.arange(39) >= 11  # the tokens that give the scores
  decode = olmoe().run(olmoe().disturbed, four.cc.pins(position[None, None]))
  assert (policies.run_mask(olmoe(), every) == decode.nll).all()
  assert (policies.run_mask(olmoe(), ~every) == four.qf.nll).all()
  tau = {row["tau"] for row in tables.SMOOTHING.read(olmoe().out)}
  assert tau == {float(np.quantile(four.cc.margins[olmoe().routers], 0.1))}


def test_the_highest_scores_of_each_sequence():
  scores = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]])
  found = policies.highest(scores, np.array([2, 1]))
  assert found.tolist() == [[False, True, True], [True, False, False]]


def score_margins(features):
  return -features[:, 0]


def flat(features):
  return features


def test_a_predictor_of_ones_own():
  scores = policies.predicted(olmoe(), f"{__name__}:score_margins")
  known = detection.features(olmoe())["cross_layer"]
  assert (scores == -known[..., 0]).all()
  with pytest.raises(ValueError, match=r"flat gave \(168, 10\), expected \(168,\)"):
    policies.predicted(olmoe(), f"{__name__}:flat")
  with pytest.raises(ValueError, match="expected module:function"):
    policies.predicted(olmoe(), "no.such:thing")


def test_references_over_both_denominators():
  rows = {row["reference"]: row for row in ran(reference_fidelity, tables.REFERENCE_FIDELITY)}
  assert set(rows) == {"full", "prefix", "decode"}
  row, _ = olmoe().contrasts(olmoe().disturbance)
  if row["interpretable"]:
    assert rows["full"]["of_total"] == row["rmf"]
  if rows["full"]["of_routed"] is not None:
    assert rows["full"]["of_routed"] == 1


def test_the_flag_is_swapped_and_nothing_else():
  native, forced = ran(flag_swap, tables.FLAG_SWAP)
  assert (native["norm_topk_prob"], forced["norm_topk_prob"]) == (False, True)
  assert native["native"] and not forced["native"]
  assert native["control"] == forced["control"] == 0
  assert native["clean_nll"] != forced["clean_nll"]


def test_gains_are_of_the_states_after_blocks():
  rows = ran(disturbance_gain, tables.GAIN)
  (clean, share), (disturbed, _) = (
    disturbance_gain.states(olmoe(), c) for c in (studies.Condition(Mode()), olmoe().disturbed)
  )
  assert share is None and clean.shape == (2, 6, 28, 32)
  size = np.linalg.norm(disturbed.astype(np.float64) - clean, axis=-1)
  ratio = size[1] / size[0]
  assert rows[0]["gain"] == pytest.approx(np.median(ratio[np.isfinite(ratio)]), rel=1e-9)


def test_bytes_of_the_published_olmoe():
  config = config_from_hf(
    tiny.FIELDS["olmoe"]
    | dict(
      hidden_size=2048,
      num_attention_heads=16,
      num_key_value_heads=16,
      num_experts=64,
      num_experts_per_tok=8,
    )
  )
  assert exchange_rate.route_bytes(config) == 22
  assert exchange_rate.precision_bytes(config) == 2048


def test_the_exchange_rate_prices_four_bits():
  (said,) = exchange_rate.run(olmoe())
  assert said == "exchange rate: skipped, it prices 4 bits, not kv2"


@pytest.mark.parametrize(
  ("precision", "bar", "verdict"),
  [
    ((0.9, 0.5, 1.2), 0.45, "NOT reached"),
    ((0.5, 0.1, 1.2), 0.25, "reached"),
    ((0.5, -0.1, 1.2), None, "NOT INTERPRETABLE"),
    ((-0.3, -0.5, -0.1), None, "NOT INTERPRETABLE"),
  ],
)
def test_what_precision_does_not_recover_is_no_bar(precision, bar, verdict, monkeypatch):
  made = four_bits()
  shares = iter([Estimate(0.3, 0.2, 0.4), Estimate(*precision)])
  monkeypatch.setattr(exchange_rate, "share_of", lambda *_: next(shares))
  (said,) = exchange_rate.run(made)
  routes, _ = tables.EXCHANGE_RATE.read(made.out)
  assert said.endswith(f"half of it: {verdict}")
  assert routes["bar"] == bar and (routes["ratio"] is None) == (bar is None)


def test_questions_are_scored_by_the_tokens_of_their_choices():
  questions = data.questions()[:3]
  tokens, scored = task_level.encode(olmoe(), questions)
  encode = olmoe().model.tokenizer.encode
  stem, choice = encode(f"Question: {questions[0].question}\nAnswer:"), questions[0].choices[0]
  assert tokens[0, 1:][scored[0]].tolist() == encode(f" {choice}")
  assert scored[0, : len(stem) - 1].sum() == 0
  nll = np.where(scored, 1.0, 100.0)
  nll[5] = 0.5  # the second choice of the second question
  assert task_level.answers(questions, nll, scored).tolist() == [0, 1, 0]


def test_choices_of_like_length_are_scored_as_all_together():
  made = olmoe()
  lengths = (30, 65, 64, 100)
  rng = np.random.default_rng(0)
  tokens = pad([rng.integers(0, made.model.config.vocab_size, n) for n in lengths], 16)
  nll, flipped = task_level.three_runs(made, tokens)
  disturbed = made.disturbance.condition(made.model, made.mode, *tokens.shape)
  run = lambda *args: run_routed(made.model, tokens, *args, prefill=1, rows=2)
  cc = run(Condition(made.mode))
  qf, qp = run(disturbed), run(disturbed, cc.pins())
  read = tokens[:, 1:] >= 0
  for name, found in (("cc", cc), ("qf", qf), ("qp", qp)):
    assert_same_bits(nll[name][read], found.nll[read].astype(np.float64))
  assert (nll["qf"] != nll["qp"]).any() and not any(x[~read].any() for x in nll.values())
  sets = cc.flips(qf)[made.routers].any(axis=0)
  np.testing.assert_array_equal(flipped[read], sets[read])
  assert 0 < flipped[read].mean() < 1


def test_one_process_repeats_itself_and_an_order_moves_it():
  made = dataclasses.replace(olmoe(), num_sequences=2)
  arms = dict(engine=dict(scheme=None, order_seed=None), orders=dict(scheme="B", order_seed=1))
  found = process_replication.run_alone(made, made.tokens, repeats=2, arms=arms)
  digests = [row["nll_sha256"] for row in found]
  assert digests[0] == digests[1] != digests[2] == digests[3]
  four = made.four
  assert found[0]["excess_total"] == four.total.mean()
  assert found[0]["route_forward"] == four.route_forward.mean()


def test_the_curve_predicts_between_its_points_only():
  curve = [dict(dose=d, rmf_low=r - 0.1, rmf_high=r + 0.1) for d, r in ((0.5, 0.2), (2.0, 0.5))]
  found = real_kernel.predicted(curve, 1.25, 0.4)
  assert found == dict(
    predicted_low=pytest.approx(0.25), predicted_high=pytest.approx(0.45), in_band=True
  )
  assert real_kernel.predicted(curve, 3.0, 0.4)["in_band"] is None
  assert real_kernel.predicted(curve, 1.25, None)["in_band"] is None
  made = olmoe()
  packed = real_kernel.points(made)[2].condition(made.model, Mode(), 1, made.length).mode
  heads = 2 * 2 * 2 * 64  # keys and values, layers, heads, positions
  assert real_kernel.cache_bytes(made, Mode()) == heads * 8 * 2
  assert real_kernel.cache_bytes(made, packed) == heads * (2 + 4)


def found_rows(interpretable: bool) -> dict:
  row, _ = olmoe().contrasts(olmoe().disturbance)
  return row | dict(paper="", interpretable=interpretable, rmf=0.3, rmf_low=0.2, rmf_high=0.4)


def test_the_held_out_split_is_read_once(tmp_path):
  made = dataclasses.replace(olmoe(), out=tmp_path)
  made.write(tables.FOUR_RUN, [found_rows(True)], "four_run")
  said = held_out.run(made)
  assert [line.split(",")[0] for line in said] == ["held out"] * 3
  (row,) = tables.HELD_OUT.read(tmp_path)
  text = studies.read_text(None, "held_out")
  assert (row["split"], row["data_sha256"]) == ("held_out", text.sha256)
  assert (row["reading"], row["forced_reads"]) == (1, 0)
  protocol = json.loads((tmp_path / "held_out_protocol.json").read_text())
  assert row["protocol_sha256"] in json.dumps(protocol)
  with pytest.raises(ValueError, match="it is read once"):
    held_out.run(made)
  held_out.run(made, force=True)
  (row,) = tables.HELD_OUT.read(tmp_path)
  assert (row["reading"], row["forced_reads"]) == (2, 1)
  other = dataclasses.replace(made, out=tmp_path / "other")
  other.write(tables.FOUR_RUN, [found_rows(False)], "four_run")
  assert "not read" in held_out.run(other)[0]


def test_the_interval_is_scipys_with_the_same_resamples():
  values = olmoe().four.total.mean(axis=1)
  found = cluster_bootstrap(mean, values, seed=3, resamples=500)
  scipy = stats.bootstrap(
    (values,), np.mean, n_resamples=500, method="percentile", rng=np.random.default_rng(3)
  ).confidence_interval
  assert (found.low, found.high) == pytest.approx(tuple(scipy), abs=1e-12)


@pytest.mark.slow
def test_intervals_cover_at_the_nominal_rate():
  """500 replications of 96 sequences whose tokens go together.

  A percentile interval of 96 clusters is a little short, 94 % rather than 95: the binomial 99.9 %
  bands of both bound the count.
  """
  rng, hits = np.random.default_rng(0), 0
  for number in range(500):
    values = 0.02 + rng.normal(size=(96, 1)) * 0.05 + rng.normal(size=(96, 20)) * 0.1
    found = cluster_bootstrap(mean, values.mean(axis=1), seed=number, resamples=1000)
    hits += found.low <= 0.02 <= found.high
  (low, _), (_, high) = (stats.binom.interval(0.999, 500, rate) for rate in (0.94, 0.95))
  assert low <= hits <= high


def test_bad_input(tmp_path):
  with pytest.raises(ValueError, match="1 sequences: intervals need at least two clusters"):
    study("olmoe", "bad", num_sequences=1)
  with pytest.raises(ValueError, match="40 tokens leave nothing behind a prefill of 40"):
    study("olmoe", "bad", prefill=40)
  with pytest.raises(ValueError, match="a KV cache of 9 bits: expected 2 to 8"):
    KvQuantization(9)
  with pytest.raises(FileNotFoundError, match=r"no file .*: expected \.jsonl"):
    studies.read_text([str(tmp_path / "no.jsonl")], "calibration")
  with pytest.raises(
    ValueError, match=r"documents give \d+ windows of 40 tokens, expected at least"
  ):
    many = study("olmoe", "bad", num_sequences=100_000)
    many.draw(many.text)


def test_too_few_sequences_are_refused_before_anything_runs(tmp_path):
  made = dataclasses.replace(olmoe(), num_sequences=4, out=tmp_path)
  with pytest.raises(ValueError, match="detection: 5 folds need 5 sequences, got 4"):
    run_all.run(made)
  assert not list(tmp_path.iterdir())


def test_files_are_split_by_document(tmp_path):
  path = tmp_path / "some.jsonl"
  path.write_text("".join(json.dumps(dict(text=f"document {n}")) + "\n" for n in range(40)))
  parts = [studies.read_text([str(path)], split).documents for split in data.SPLITS]
  texts = [{document.text for document in part} for part in parts]
  assert not texts[0] & texts[1] and len(texts[0] | texts[1]) == 40 and all(texts)


def test_a_changed_registry_is_refused(tmp_path):
  made = dataclasses.replace(olmoe(), out=tmp_path)
  record = made.record()
  run_all.registry.register(tmp_path, run_all.PREDICTIONS, record)
  path = tmp_path / "predictions.json"
  path.write_text(path.read_text().replace("0.65", "0.55"))
  with pytest.raises(ValueError, match="hash"):
    run_all.registry.register(tmp_path, run_all.PREDICTIONS, record)


def test_every_prediction_and_claim_reads_tables_that_exist():
  run_all.registry.check(run_all.PREDICTIONS, tables.TABLES)
  for claim in run_all.CLAIMS:
    columns = {column.name for column in tables.TABLES[claim.table].columns}
    assert {*claim.select, *claim.columns} <= columns
  written = {table.name for protocol in run_all.PROTOCOLS for table in protocol.TABLES}
  assert written | {"data_manifest", "predictions", "evidence", "negative_results"} == set(
    tables.TABLES
  )


def test_all_models_are_one_headline(tmp_path, monkeypatch):
  def make(name):
    return study(name, tmp_path / name, disturbance=KvQuantization(2))

  monkeypatch.setattr(all_models.studies, "from_flags", make)
  few = lambda made: [made.disturbance, WeightQuantization(3)]
  monkeypatch.setattr(four_run, "disturbances", few)
  monkeypatch.setattr(all_models.run_all, "run", lambda made: four_run.run(made)[:1])
  said = all_models.run(["olmoe", "qwen3_moe"])
  assert [line.split(":")[0] for line in said[:-1]] == ["olmoe", "qwen3_moe"]
  rows = [row for name in ("olmoe", "qwen3_moe") for row in tables.FOUR_RUN.read(tmp_path / name)]
  header, *lines = (tmp_path / "headline.tsv").read_text().splitlines()
  columns = tables.FOUR_RUN.columns
  assert header.split("\t") == [column.name for column in columns]
  assert lines == ["\t".join(column.format(row[column.name]) for column in columns) for row in rows]
  assert {row["model"] for row in rows} == {"tiny-olmoe", "tiny-qwen3_moe"}
  assert len((tmp_path / "models.tsv").read_text().splitlines()) == 3
  assert (tmp_path / "headline.svg").is_file() and (tmp_path / "headline.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(tiny.FAMILIES) - {"mixtral"}))
def test_the_whole_study(family):
  made = study(family, f"whole-{family}")
  said = run_all.run(made)
  assert sum(any(word in line for word in ("MET ", "MISSED", "NOT INTERP")) for line in said) >= 12
  for name, table in tables.TABLES.items():
    if table.path(made.out).is_file():
      rows = table.read(made.out)
      assert rows or name in ("probes", "negative_results")
  assert not {"four_run", "layers", "dose_sweep", "real_kernel"} - {
    path.stem for path in made.out.glob("*.tsv")
  }
  assert all(row["control"] == 0 for row in tables.FOUR_RUN.read(made.out))
  again = run_all.run(dataclasses.replace(made, resume=True))
  assert [line for line in again if line.endswith(": kept")]


def test_doses_are_relative_to_four_bits():
  assert KvQuantization(4) in dose_sweep.POINTS
  bits = [point.bits for point in dose_sweep.POINTS if point.strength == 1]
  assert bits == [8, 6, 5, 4, 3, 2]


def test_contrasts_need_no_statistics_of_routers():
  four = dataclasses.replace(
    olmoe().four, qf=dataclasses.replace(olmoe().four.qf, ties=None, margins=None)
  )
  assert contrasts(four, olmoe().routers, 0)["ties"] == 0


def test_runs_do_not_depend_on_the_number_of_rows():
  whole = olmoe().four.qf.nll
  assert_same_bits(olmoe().run(olmoe().disturbed, rows=4).nll, whole)
