"""The papers' figures: each once, each a figure, and consistent with one another."""

from collections import Counter
import re

import pytest

from moejax.report import paper_figures, reduction_tables

PROMPTS = ("why the sheep", "朋友昨天打来电话", "Morning light filled the room")
SCHEMES = ("P32", "C", "A", "B")
ROUTE_TABLES = (
  *("four_run", "attribution", "detection", "probes", "policies", "smoothing"),
  *("reference_fidelity", "flag_swap", "dose_sweep", "dose_summary", "weight_bound"),
  *("real_kernel", "process_replication", "task_level", "tax", "disturbance_gain_summary"),
  *("exchange_rate", "held_out"),
)


def number(table, row, column, study="reduction"):
  """The value of a figure as a number, its thousands separators dropped."""
  value = float(paper_figures.find(table, row, column, study).value.replace(",", ""))
  return int(value) if value.is_integer() else value


def route(table, row, column):
  return number(table, row, column, study="route")


@pytest.mark.parametrize("study,least", [("reduction", 200), ("route", 150)])
def test_keys_are_unique_and_each_row_is_found_by_its_own(study, least):
  figures = paper_figures.figures(study)
  assert len(figures) > least
  assert max(Counter(figure[:3] for figure in figures).values()) == 1
  assert all(paper_figures.find(*figure[:3], study) is figure for figure in figures)


def test_the_first_study_is_the_default_and_another_is_refused():
  assert paper_figures.figures() is paper_figures.figures("reduction")
  assert paper_figures.NOTES["reduction"] is paper_figures.NOTE
  for look_up in (paper_figures.figures, lambda study: paper_figures.find("x", "y", "z", study)):
    with pytest.raises(ValueError, match=r"'reduction', 'route'\], got 'x'"):
      look_up("x")


def test_every_row_parses():
  plain = re.compile(r"\d{1,3}(,\d{3})+|\d+(\.\d+)?")
  members = re.compile(r"\{\d+(, \d+){5}\}")
  where = re.compile(r"(section \d(\.\d){1,2}|appendix [AB]\.\d|figure [123])(, .+)?")
  sets = []
  for figure in paper_figures.figures():
    assert all(cell == cell.strip() for cell in figure)
    assert figure.row and figure.column and where.fullmatch(figure.where), figure
    if not plain.fullmatch(figure.value):
      assert members.fullmatch(figure.value), figure
      sets.append((figure.row, figure.column))
    if figure.denominator:
      assert plain.fullmatch(figure.denominator), figure
      count, total = (int(x.replace(",", "")) for x in (figure.value, figure.denominator))
      assert 0 <= count <= total, figure
  assert sets == [("router_set", "native"), ("router_set", "branch")]


def test_every_row_of_the_route_study_parses():
  plain = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+(\.\d+)?)")
  row = re.compile(r"all|(olmoe|qwen15|qwen3|deepseek)(/[a-z0-9_. ]+){0,3}")
  where = re.compile(r"(section [1-8]|appendix A|table [1-8])(, [^,]+)*")
  for figure in paper_figures.figures("route"):
    assert all(cell == cell.strip() for cell in figure)
    assert plain.fullmatch(figure.value) and figure.denominator in ("", "3", "4"), figure
    assert row.fullmatch(figure.row) and where.fullmatch(figure.where), figure
    assert re.fullmatch(r"[a-z0-9_]+", figure.column), figure


def test_tables_are_ours():
  named = {figure.table for figure in paper_figures.figures()}
  assert named <= set(reduction_tables.TABLES)
  assert {"native_replay", "kv_equivalence_summary", "replay_pairs"} <= named
  assert {figure.table for figure in paper_figures.figures("route")} == set(ROUTE_TABLES)


@pytest.mark.parametrize(
  "table,row,column,text",
  [
    ("native_replay", "all", "prompts", "13"),
    ("native_replay", "all", "combined_linf", "0"),
    ("basin_counts", "A", "texts", "10"),
    ("basin_counts", "B", "texts", "11"),
    ("event_direction_counts", "hiring", "provisional_classes", "110/360"),
    ("event_direction_counts", "hiring", "consensus_classes", "113/360"),
    ("event_direction_counts", "all", "fork_token", "303"),
    ("event_direction_unique_continuations", "all", "items", "6"),
    ("human_annotation_agreement", "all", "kappa", "1.0"),
    ("mhc_equivalence_summary", "B", "delta_linf", "0.001953125"),
    ("mhc_equivalence_summary", "B", "values_equal", "16,384/16,384"),
    ("kv_equivalence_summary", "B", "differing", "131,444/5,883,008"),
    ("kv_equivalence_summary", "B", "delta_linf", "1.0"),
    ("kv_equivalence_summary", "B", "fp32_layers", "10/43"),
    ("breadth_summary", "8/candidate", "cumulative", "3/10"),
    ("breadth_summary", "32/all", "cumulative", "36/50"),
    ("breadth_summary", "16/all", "saved_single_line", "7"),
    ("breadth_summary", "32/all", "saved_single_line", "3"),
    ("persistent_ablation", "朋友昨天打来电话/P32", "native_tokens", "39/64"),
    ("persistent_ablation", "all/P32", "native_tokens", "161/192"),
    ("canonical_reference", "P32", "native_tokens", "2/3"),
    ("c_intermediate_summary", "all", "equal", "192/192"),
    ("mhc_equivalence_summary", "B", "reconstruction_error", "0"),
    ("mhc_equivalence_summary", "B", "post_mhc_linf", "0"),
    ("mhc_prefork_equivalence", "B", "linf", "0"),
    ("propagation_trace", "moe_output", "layer", "2"),
    ("propagation_trace", "post_mhc", "layer", "2"),
    ("propagation_trace", "router_scores", "layer", "3"),
    ("propagation_trace", "moe_output", "linf", "0.0375366211"),
    ("propagation_trace", "post_mhc", "linf", "0.0307998657"),
    ("propagation_trace", "router_scores", "linf", "0.01445961"),
    ("propagation_trace", "router_margin", "native", "0.00335884094"),
    ("propagation_trace", "router_margin", "branch", "0.000484466553"),
    ("propagation_trace", "lm_logits", "linf", "0.626680374"),
    ("propagation_trace", "lm_margin", "native", "0.382600784"),
    ("propagation_trace", "lm_margin", "branch", "0.446601868"),
    ("propagation_trace", "first_changed_token", "native", "11885"),
    ("propagation_trace", "first_changed_token", "branch", "5477"),
    ("replay_pairs", "all", "exit_zero", "20/20"),
    ("replay_pairs", "270", "num_tokens", "64"),
    ("replay_environment", "OMP_NUM_THREADS", "value", "32"),
    ("replay_environment", "PIPE_WORKERS", "value", "8"),
  ],
)
def test_figures_as_the_paper_prints_them(table, row, column, text):
  assert paper_figures.beside(table, row, column) == text


@pytest.mark.parametrize(
  "table,row,column,text",
  [
    ("four_run", "olmoe/kv4", "decode_tokens", "18,432"),
    ("four_run", "olmoe/kv4", "rmf", "0.31"),
    ("four_run", "olmoe/kv4", "rmf_low", "0.20"),
    ("four_run", "olmoe/kv4", "rmf_high", "0.41"),
    ("four_run", "olmoe/kv4/rerun", "rmf", "0.231"),
    ("four_run", "qwen15/kv4", "rmf", "0.290"),
    ("attribution", "olmoe/kv4/jump", "share", "0.45"),
    ("attribution", "olmoe/kv4/pure_flux", "share", "0.002"),
    ("detection", "olmoe/kv4/flip", "auc", "0.772"),
    ("detection", "olmoe/kv4/harm", "auc", "0.490"),
    ("detection", "olmoe/kv4/benefit", "auc", "0.499"),
    ("probes", "olmoe/kv4", "flips", "2,553"),
    ("probes", "olmoe/kv4/cross_layer_trees", "auc_high", "0.527"),
    ("policies", "olmoe/kv4/oracle", "minus_random_low", "-0.018"),
    ("policies", "deepseek/kv4/margin", "minus_random", "-0.018"),
    ("smoothing", "olmoe/kv4/beneficial", "delta", "-0.047"),
    ("reference_fidelity", "olmoe/kv4/prefix", "of_routed", "0.231"),
    ("reference_fidelity", "qwen3/kv4/prefix", "of_total", "0.038"),
    ("reference_fidelity", "qwen3/kv4/full", "of_total_high", "0.574"),
    ("flag_swap", "all", "controls_met", "4/4"),
    ("flag_swap", "qwen3/kv4/forced", "full_recovery", "0.596"),
    ("dose_sweep", "olmoe/11.7x", "rmf", "0.54"),
    ("dose_summary", "olmoe/kv4", "decline", "0.0339"),
    ("weight_bound", "olmoe/w4 and w3", "rmf_max", "0.123"),
    ("real_kernel", "olmoe/int4", "rmf_low", "-0.111"),
    ("process_replication", "olmoe/kv4/rmf", "icc", "1.0"),
    ("task_level", "olmoe/kv4/arc_easy", "cancellation", "0.966"),
    ("tax", "deepseek/kv4", "cancellation", "0.902"),
    ("disturbance_gain_summary", "olmoe/kv4", "gain_product", "56.7"),
    ("disturbance_gain_summary", "qwen15/kv4", "shared_share", "0.106"),
    ("exchange_rate", "olmoe/kv4/routes", "ratio", "28.7"),
    ("held_out", "olmoe/kv4", "met", "2/3"),
    ("held_out", "olmoe/kv4", "oracle_high", "0.0082"),
    ("four_run", "olmoe/kv4", "interaction", ""),
    ("basin_counts", "A", "texts", ""),
  ],
)
def test_figures_of_the_route_study_as_the_paper_prints_them(table, row, column, text):
  assert paper_figures.beside(table, row, column, study="route") == text


def test_what_the_paper_does_not_have_is_nothing():
  assert paper_figures.find("basin_counts", "A", "texts") is not None
  for key in [("basin_counts", "A", "x"), ("basin_counts", "D", "texts"), ("x", "A", "texts")]:
    assert paper_figures.find(*key) is None
  assert paper_figures.beside("basin_counts", "C", "texts") == ""


def test_the_notes_name_the_other_models():
  assert "DeepSeek-V4-Flash" in paper_figures.NOTE and "Colibri" in paper_figures.NOTE
  for model in ("OLMoE-1B-7B", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "DeepSeek-MoE-16B"):
    assert model in paper_figures.NOTES["route"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompts_add_up_to_all(scheme):
  for column in ("native_routes", "native_tokens"):
    parts = [number("persistent_ablation", f"{prompt}/{scheme}", column) for prompt in PROMPTS]
    assert sum(parts) == number("persistent_ablation", f"all/{scheme}", column)
  for what in ("routes", "tokens"):
    total = number("persistent_ablation", f"all/{scheme}", f"canonical_{what}")
    assert total == number("canonical_reference", scheme, f"schedule_{what}")


def test_unique_continuations_by_prompt_and_scheme():
  count = lambda row: number("persistent_ablation", row, "unique_continuations")
  counts = [[count(f"{prompt}/{scheme}") for scheme in SCHEMES] for prompt in PROMPTS]
  assert counts == [[4, 1, 8, 10], [8, 1, 10, 8], [9, 1, 10, 9]]


def test_c_is_native_everywhere():
  zero = [
    figure
    for figure in paper_figures.figures()
    if figure[:2] in [("canonical_reference", "C"), ("persistent_ablation", "all/C")]
    or (figure.table == "c_intermediate_summary" and re.search("linf|mis", figure.column))
  ]
  assert len(zero) == 3 * 5 + 3 + 4 + 4
  assert {figure.value for figure in zero} == {"0"}


def test_trajectories_are_prompts_times_schedules_times_schemes():
  count = lambda column: number("persistent_ablation", "all", column)
  assert count("schedules") == 64 * count("prompts")
  assert count("trajectories") == count("schedules") * len(SCHEMES)
  assert count("runs") == count("trajectories") + count("baselines")
  checked = lambda row: number("c_intermediate_summary", row, "schedules")
  assert checked("all") == sum(map(checked, PROMPTS)) == count("schedules")
  assert number("canonical_reference", "all", "trajectories") == count("prompts") * len(SCHEMES)


def test_breadth_is_one_cohort_that_shrinks():
  count = lambda row, column: number("breadth_summary", row, column)
  at_risk, cumulative = count("all", "prompts"), 0
  for horizon in ("8/all", "16/all", "32/all"):
    assert count(horizon, "at_risk") == at_risk
    cumulative += count(horizon, "new")
    assert count(horizon, "cumulative") == cumulative
    assert count(horizon, "saved") == count(horizon, "new") + count(horizon, "repeated")
    at_risk -= count(horizon, "new")
  for groups in [("en", "zh"), ("ordinary", "candidate")]:
    assert sum(count(group, "prompts") for group in groups) == count("all", "prompts")
    assert sum(count(f"8/{g}", "cumulative") for g in groups) == count("8/all", "cumulative")
    for group in groups:
      figure = paper_figures.find("breadth_summary", f"8/{group}", "cumulative")
      assert int(figure.denominator) == count(group, "prompts")


def test_directions_add_up_to_the_classes():
  count = lambda row, column: number("event_direction_counts", row, column)
  labels = ("layoffs", "hiring", "other")
  for source in ("provisional", "consensus"):
    assert sum(count(x, f"{source}_classes") for x in labels) == count("all", "classes")
  moved = [count(x, "consensus_classes") - count(x, "provisional_classes") for x in labels]
  assert moved == [0, count("hiring", "corrected_classes"), -count("hiring", "corrected_classes")]


def test_checkpoints_follow_from_layers_and_inputs():
  mhc = lambda column: number("mhc_equivalence_summary", "B", column)
  kv = lambda column: number("kv_equivalence_summary", "B", column)
  fork, layers, inputs = mhc("layer"), kv("layers"), mhc("inputs")
  assert mhc("prefork_equal") == fork
  assert mhc("post_mhc_equal") == (layers - fork) + (inputs - 1) * layers
  assert mhc("routes_equal") == inputs * layers
  assert mhc("predictions_equal") == kv("predictions_equal") == inputs + 1
  assert kv("inputs") == kv("predictions_after_injection") == inputs - 1
  for column in ("post_mhc_equal", "states_equal", "routes_equal"):
    assert kv(column) == kv("inputs") * layers
  assert kv("layers_untouched") == fork + 1 == layers - kv("layers_differing")
  assert kv("fp64_layers") == layers


def test_protocols_share_their_event_state_and_seed():
  same = lambda column, *tables: {number(table, row, column) for table, row in tables}
  mhc, kv = ("mhc_equivalence_summary", "B"), ("kv_equivalence_summary", "B")
  prefork, trace = ("mhc_prefork_equivalence", "B"), "propagation_trace"
  basins, event = ("basin_counts", "all"), ("event_direction_counts", "all")
  assert same("layer", mhc, basins, event) == {5}
  assert same("branch", mhc, kv) == {135}
  assert same("position", mhc, kv) == {number(trace, "all", "position") + 1}
  token = number(trace, "lm_argmax", "native")
  assert same("fork_token", mhc, basins) == {token} == {number(trace, "lm_argmax", "branch")}
  assert number(*event, "fork_token") != token
  assert same("values", mhc, prefork) == {4 * 4096}
  differing = paper_figures.find(*kv, "differing")
  assert differing.denominator == paper_figures.find(*kv, "values").value
  runs = [("breadth_summary", "all"), ("persistent_ablation", "all")]
  assert same("seed", *runs, ("c_intermediate_summary", "all")) == {20260722}
  assert number("replay_branches", "all", "seed") == 20260723
  horizons = same("horizon", basins, ("persistent_ablation", "all"), (trace, "all"))
  assert horizons == {number("replay_branches", "all", "prefix_tokens")} == {8}


def test_the_router_sets_differ_by_what_enters_and_leaves():
  cell = lambda column: paper_figures.find("propagation_trace", "router_set", column).value
  native, branch = ({int(x) for x in re.findall(r"\d+", cell(c))} for c in ("native", "branch"))
  assert branch - native == {int(cell("enters"))}
  assert native - branch == {int(cell("leaves"))}
  assert len(native - branch) == int(cell("changed"))
  ordinal = number("propagation_trace", "first_changed_token", "ordinal")
  assert ordinal == number("propagation_trace", "first_changed_token", "agreeing") + 1


def test_replay_pairs_are_the_branches_drawn():
  every = [figure for figure in paper_figures.figures() if figure.table == "replay_pairs"]
  branches = {figure.row for figure in every} - {"all"}
  count = lambda column: number("replay_pairs", "all", column)
  assert len(branches) == count("branches") == count("tokens_equal")
  assert count("exit_zero") == sum(number("replay_pairs", b, "runs") for b in branches)
  drawn = [number("replay_branches", x, "branches") for x in ("layoffs", "hiring")]
  assert sum(drawn) == count("branches")
  lengths = {number("replay_pairs", b, "num_tokens") for b in branches}
  assert lengths == {count("num_tokens")} == {number("replay_branches", "all", "num_tokens")}


def test_structural_classes_halve_the_orders_of_b_only():
  count = lambda scheme, column: number("basin_counts", scheme, column)
  assert count("A", "classes") == count("A", "orders") == 2 * count("B", "classes")
  assert count("B", "orders") == count("A", "orders")
  for scheme in "AB":
    same = {count(scheme, c) for c in ("classes", "outputs", "states", "states_unlike_native")}
    assert len(same) == 1 and count(scheme, "texts") < same.pop()


def test_intervals_have_both_ends_and_hold_their_value():
  figures = {
    figure[:3]: float(figure.value.replace(",", "")) for figure in paper_figures.figures("route")
  }
  ends = {
    end: {(t, r, c[: -len(end)]) for t, r, c in figures if c.endswith(end)}
    for end in ("_low", "_high")
  }
  assert ends["_low"] == ends["_high"] and len(ends["_low"]) > 20
  for table, row, name in ends["_low"]:
    low, high = (figures[table, row, name + end] for end in ("_low", "_high"))
    assert low < figures.get((table, row, name), (low + high) / 2) < high, (table, row, name)


def test_the_two_path_rerun_lies_in_the_headline_interval():
  rerun = lambda column: route("four_run", "olmoe/kv4/rerun", column)
  headline = lambda column: route("four_run", "olmoe/kv4", column)
  assert rerun("rmf") == round(rerun("route_forward") / rerun("excess_total"), 3)
  assert headline("rmf_low") < rerun("rmf") < headline("rmf_high")
  assert headline("excess_total") == rerun("excess_total")
  assert headline("route_forward") == pytest.approx(rerun("route_forward"), abs=0.0005)
  assert headline("decode_tokens") == headline("sequences") * (256 - headline("prefill_tokens"))


def test_masks_partition_the_signed_sum():
  share = lambda mask: route("attribution", f"olmoe/kv4/{mask}", "share")
  assert share("jump") + share("nonlocal") == 1  # to the digits printed
  assert share("set_change") + share("pure_flux") == 1


def test_the_benefit_auc_is_a_mixture():
  find = lambda part, column: route("detection", f"olmoe/kv4/benefit{part}", column)
  groups = ("/no_flip", "/harmless_flip")
  assert sum(find(group, "weight") for group in groups) == 1
  mixture = sum(find(group, "weight") * find(group, "auc") for group in groups)
  assert round(mixture, 3) == find("", "auc")


def test_probes_lie_in_the_band_and_cover_chance():
  band = route("probes", "all", "band")
  aucs = [f for f in paper_figures.figures("route") if f.table == "probes" and f.column == "auc"]
  assert len(aucs) == 4
  for figure in aucs:
    assert abs(float(figure.value) - 0.5) <= band
  for kind in ("logistic", "trees"):
    ends = [route("probes", f"olmoe/kv4/cross_layer_{kind}", f"auc_{e}") for e in ("low", "high")]
    assert ends[0] < 0.5 < ends[1]


def test_doses_rise_while_the_fraction_peaks():
  sweep = lambda row, column: route("dose_sweep", f"olmoe/{row}", column)
  summary = lambda column: route("dose_summary", "olmoe/kv4", column)
  doses = [sweep(row, "dose") for row in ("1x", "5.4x", "11.7x")]
  fractions = [sweep(row, "rmf") for row in ("1x", "5.4x", "11.7x")]
  assert doses == sorted(doses) and max(fractions) == fractions[1] == summary("peak_rmf")
  assert doses[1] == summary("peak_dose")
  assert fractions[1] - fractions[2] == pytest.approx(summary("decline"), abs=0.01)
  for end, factor in (("min", 0.8), ("max", 1.2)):
    matched = factor * sweep("1x", "excess_total")
    assert sweep("1x", f"matched_{end}") == pytest.approx(matched, abs=1e-4)
  kernel = [route("real_kernel", f"olmoe/int{bits}", "rmf") for bits in (4, 3, 2)]
  assert kernel == sorted(kernel, reverse=True)


def test_the_same_quantity_is_the_same_in_two_tables():
  anchor, dose = ("four_run", "olmoe/kv4"), ("dose_sweep", "olmoe/1x")
  for column in ("rmf", "excess_total"):
    assert route(*anchor, column) == route(*dose, column)
  full, native = ("reference_fidelity", "qwen3/kv4/full"), ("flag_swap", "qwen3/kv4/native")
  assert route(*full, "of_total") == route(*native, "full_recovery")
  replicated = lambda column: route("process_replication", "olmoe/kv4/rmf", column)
  assert replicated("low") < replicated("mean") < replicated("high")
  assert round(replicated("mean"), 2) == route(*anchor, "rmf")


def test_the_held_out_miss_is_what_lies_over_the_bar():
  find = lambda column: route("held_out", "olmoe/kv4", column)
  over = find("oracle_high") - find("oracle_bound")
  assert find("oracle_missed_by") == pytest.approx(over, abs=1e-9)
  smaller = min(find("tax_harmful"), -find("tax_beneficial"))
  assert find("tax_net") < find("tax_bound") * smaller
  assert find("rmf_low") < route("four_run", "olmoe/kv4", "rmf_high")


def test_two_ratios_do_not_follow_from_the_rounded_figures_beside_them():
  rate = lambda arm, column: route("exchange_rate", f"olmoe/kv4/{arm}", column)
  routes, precision = (rate(x, "recovery") / rate(x, "bytes") for x in ("routes", "precision"))
  assert round(routes / precision, 1) == 28.6 != rate("routes", "ratio")
  tax = lambda column: route("tax", "deepseek/kv4", column)
  assert round(-tax("beneficial") / tax("harmful"), 3) == 0.893 != tax("cancellation")
