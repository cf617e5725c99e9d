"""Reads the tables of a study back and counts everything again.

    python -m experiments.reduction.audit --model=dsv4-nano --out=out/reduction

Every count that can be had from raw rows is recomputed, every identity that must hold for any model
is checked. Ends with an error that lists what is wrong: a missing table or row, a repeated key, a
count that is not that of the rows, an equality that does not hold.
"""

from collections.abc import Callable, Iterator
import itertools
import pathlib

from configs import prompts as prompt_sets
from experiments.reduction import (
  breadth as breadth_protocol,
)
from experiments.reduction import (
  persistent,
  schedule_runs,
)
from experiments.reduction import (
  study as studies,
)
from moejax.analysis import tokens_sha256
from moejax.report import reduction_tables as tables
from moejax.report.schema import Row, Table

Found = Iterator[str]


def run(study: studies.Study) -> list[str]:
  """Checks all tables that are there; returns what to say.

  Raises:
    ValueError: lists what is wrong.
  """
  read = {table.name: load(study.out, table, study.identity) for table in needed(study.out)}
  # A fork of the first layer has no layers before it.
  for name in read:
    if not read[name] and (name, study.fork_layer) != (tables.MHC_PREFORK.name, 0):
      raise ValueError(f"audit: {name} has no rows.")
  wrong = [
    f"{check.__name__}: {message}"
    for check in CHECKS
    if all(name in read for name in check.tables)
    for message in check(study, *(read[name] for name in check.tables))
  ]
  if wrong:
    raise ValueError("audit: " + "; ".join(wrong))
  rows = sum(map(len, read.values()))
  return [f"audit: {len(read)} tables, {rows} rows, {len(CHECKS)} checks, all as they must be"]


def needed(out: pathlib.Path) -> list[Table]:
  """Tables that must be there: all but those that only people's forms give."""
  optional = (tables.AGREEMENT, tables.CONFUSION)
  return [t for t in tables.TABLES.values() if t not in optional or t.path(out).is_file()]


def load(out: pathlib.Path, table: Table, identity: Row) -> list[Row]:
  """The rows of a table, all of this study."""
  rows = table.read(out)
  for row in rows:
    for name, value in identity.items():
      if row[name] != value:
        raise ValueError(f"audit: {table.name}: {name} is {row[name]!r}, expected {value!r}.")
  return rows


CHECKS: list[Callable[..., Found]] = []


def check(*names: Table):
  """Registers a check of the rows of some tables: a generator of what is wrong."""

  def register(function):
    function.tables = tuple(table.name for table in names)
    CHECKS.append(function)
    return function

  return register


def unlike(where: str, found, expected) -> Found:
  """One message if two values differ."""
  if found != expected:
    yield f"{where} is {found}, expected {expected}"


def grouped(rows: list[Row], *names: str) -> dict[tuple, list[Row]]:
  """Rows by the values of some columns."""
  out: dict[tuple, list[Row]] = {}
  for row in rows:
    out.setdefault(tuple(row[name] for name in names), []).append(row)
  return out


@check(tables.NATIVE_REPLAY)
def native_replay(study, rows) -> Found:
  expected = len(study.prompts or prompt_sets.REPLAY)
  yield from unlike("number of prompts", len(rows), expected)
  for row in rows:
    yield from unlike(f"{row['prompt']}: routes", row["routes_equal"], row["routes"])
    yield from unlike(f"{row['prompt']}: tokens", row["tokens_equal"], row["tokens"])
    yield from unlike(f"{row['prompt']}: text_equal", row["text_equal"], True)
    yield from unlike(f"{row['prompt']}: combined_linf", row["combined_linf"], 0.0)
    routed = len(study.model.config.moe_layers)
    yield from unlike(f"{row['prompt']}: routes", row["routes"], row["positions"] * routed)


@check(tables.BRANCHES, tables.BASIN_COUNTS, tables.BASIN_RANK_FREQUENCY)
def basins(study, branches, counts, ranks) -> Found:
  by_sweep = grouped(branches, "prompt", "scheme")
  by_horizon = grouped(ranks, "prompt", "scheme", "horizon")
  for row in counts:
    where = f"{row['prompt']}, {row['scheme']}, {row['horizon']}"
    mine = by_sweep.get((row["prompt"], row["scheme"]), [])
    yield from unlike(f"{where}: classes", row["classes"], len(mine))
    yield from unlike(f"{where}: orders", row["orders"], sum(b["weight"] for b in mine))
    for name, column in (
      ("outputs", "output"),
      ("states", "state_sha256"),
      ("complete_states", "complete_state"),
    ):
      yield from unlike(f"{where}: {name}", row[name], len({b[column] for b in mine}))
    for name in ("output_linf", "state_linf"):
      yield from unlike(f"{where}: {name}", row[name], max((b[name] for b in mine), default=0.0))
    volumes: dict[str, int] = {}
    for branch in mine:
      tokens = studies.parse_ids(branch["tokens"])[: row["horizon"]]
      sha256 = tokens_sha256(tokens)
      volumes[sha256] = volumes.get(sha256, 0) + branch["weight"]
    yield from unlike(f"{where}: texts", row["texts"], len(volumes))
    basins = by_horizon.pop((row["prompt"], row["scheme"], row["horizon"]), [])
    found = {basin["tokens_sha256"]: basin["order_count"] for basin in basins}
    yield from unlike(f"{where}: basin volumes", found, volumes)
    sizes = [basin["order_count"] for basin in sorted(basins, key=lambda b: b["rank"])]
    yield from unlike(f"{where}: ranks", sizes, sorted(sizes, reverse=True))
    native = sum(basin["order_count"] for basin in basins if basin["native"])
    yield from unlike(f"{where}: native_basin_orders", row["native_basin_orders"], native)
    if row["scheme"] == "B" and not row["sampled"]:
      yield from unlike(f"{where}: orders", row["orders"], 2 * row["classes"])
  for key in by_horizon:
    yield f"{key}: ranks without a count"


@check(tables.MHC, tables.MHC_PREFORK, tables.MHC_SUMMARY)
def mhc(study, rows, prefork, summary) -> Found:
  layers = study.model.config.num_layers
  for row in summary:
    key = (row["prompt"], row["scheme"])
    mine = grouped(rows, "prompt", "scheme").get(key, [])
    before = grouped(prefork, "prompt", "scheme").get(key, [])
    inputs = row["predictions"] - 1
    formula = (layers - row["layer"]) + (inputs - 1) * layers
    counted = [r for r in mine if r["compared"]]
    for name, value in (
      ("post_mhc_checkpoints", formula),
      ("route_checkpoints", inputs * layers),
      ("prefork_checkpoints", row["layer"]),
    ):
      yield from unlike(f"{key}: {name}", row[name], value)
    for name, value in (
      ("post_mhc_equal", sum(r["post_mhc_equal"] for r in counted)),
      ("post_mhc_checkpoints", len(counted)),
      ("routes_equal", sum(r["route_equal"] for r in mine)),
      ("route_checkpoints", len(mine)),
      ("prefork_equal", sum(r["equal"] for r in before)),
      ("prefork_checkpoints", len(before)),
    ):
      yield from unlike(f"{key}: {name}", row[name], value)
    for name in ("post_mhc", "route", "prefork", "prediction"):
      whole, equal = _names(name)
      yield from unlike(f"{key}: {equal}", row[equal], row[whole])
    for name in ("pre_state_equal", "post_state_equal", "text_equal"):
      yield from unlike(f"{key}: {name}", row[name], True)
  for r in [*rows, *prefork]:
    same = r["branch_sha256"] == r.get("injected_sha256", r.get("native_sha256"))
    yield from unlike(f"layer {r['layer']}: hash", same, r.get("post_mhc_equal", r.get("equal")))


def _names(what: str) -> tuple[str, str]:
  if what == "prediction":
    return "predictions", "predictions_equal"
  return f"{what}_checkpoints", "routes_equal" if what == "route" else f"{what}_equal"


@check(tables.KV, tables.KV_LAYERS, tables.KV_SUMMARY)
def kv(study, rows, by_layer, summary) -> Found:
  layers = study.model.config.num_layers
  for row in summary:
    key = (row["prompt"], row["scheme"])
    mine = grouped(rows, "prompt", "scheme").get(key, [])
    parts = sorted(grouped(by_layer, "prompt", "scheme").get(key, []), key=lambda r: r["layer"])
    # A branch whose next token is another one can't be moved: it is never forced.
    movable = row["next_token_equal"] or not row["vacuous"]
    yield from unlike(f"{key}: checkpoints", row["checkpoints"], (row["predictions"] - 2) * layers)
    yield from unlike(f"{key}: checkpoints", row["checkpoints"], len(mine))
    yield from unlike(f"{key}: layers", row["layers"], len(parts))
    untouched = len(list(itertools.takewhile(lambda r: r["differing"] == 0, parts)))
    yield from unlike(f"{key}: layers_untouched", row["layers_untouched"], untouched)
    for name, column in (
      ("post_mhc_equal", "post_mhc_equal"),
      ("states_equal", "state_equal"),
      ("routes_equal", "route_equal"),
    ):
      yield from unlike(f"{key}: {name}", row[name], sum(r[column] for r in mine))
      if movable:
        yield from unlike(f"{key}: {name}", row[name], row["checkpoints"])
    for name, column in (
      ("values", "values"),
      ("differing", "differing"),
      ("fp64_exceptions", "fp64_exceptions"),
      ("fp64_layers", "fp64_equal"),
      ("fp32_layers", "fp32_equal"),
      ("xor_layers", "xor_equal"),
    ):
      yield from unlike(f"{key}: {name}", row[name], sum(r[column] for r in parts))
    yield from unlike(f"{key}: xor_layers", row["xor_layers"], row["layers"])
    if row["layers_untouched"] <= row["layer"]:
      yield f"{key}: the state of a layer up to the fork's differs"
    if movable:
      yield from unlike(f"{key}: predictions_equal", row["predictions_equal"], row["predictions"])
      for name in ("next_token_equal", "text_equal"):
        yield from unlike(f"{key}: {name}", row[name], True)


@check(tables.EVENT_COUNTS, tables.EVENT_UNIQUE)
def event_counts(study, counts, unique) -> Found:
  for source, rows in grouped(counts, "source").items():
    total = sum(row["class_count"] for row in rows)
    yield from unlike(f"{source}: classes", total, rows[0]["classes"])
    orders = sum(row["order_count"] for row in rows)
    yield from unlike(f"{source}: orders", orders, rows[0]["orders"])
    column = {"rule": "provisional", "people": "consensus"}[source[0]]
    for row in rows:
      if row["status"] == "labelled":
        mine = sum(u["class_count"] for u in unique if u[column] == row["label"])
        yield from unlike(f"{source}, {row['label']}: classes", row["class_count"], mine)
  yield from unlike("texts: classes", sum(u["class_count"] for u in unique), unique[0]["classes"])


@check(tables.REPLAY_BRANCHES, tables.REPLAY_PAIRS)
def replay(study, branches, pairs) -> Found:
  hashes = {row["branch"]: row["tokens_sha256"] for row in branches}
  yield from unlike("pairs", [p["branch"] for p in pairs], [b["branch"] for b in branches])
  for row in branches:
    tokens = studies.parse_ids(row["tokens"])
    yield from unlike(f"{row['branch']}: sha256", row["tokens_sha256"], tokens_sha256(tokens))
    yield from unlike(f"{row['branch']}: num_tokens", row["num_tokens"], len(tokens))
    yield from unlike(f"{row['branch']}: prefix_equal", row["prefix_equal"], True)
  for row in pairs:
    for name in ("tokens_equal", "like_sweep", "sha256_equal", "metadata_equal", "exit_zero"):
      yield from unlike(f"{row['branch']}: {name}", row[name], True)
    for name in ("first_sha256", "second_sha256"):
      yield from unlike(f"{row['branch']}: {name}", row[name], hashes.get(row["branch"]))


@check(tables.BREADTH_BRANCHES, tables.BREADTH)
def breadth(study, rows, summary) -> Found:
  prompts = study.prompts or prompt_sets.BREADTH
  for row in rows:
    native, branch = (row[f"{name}_tokens"] for name in ("native", "branch"))
    where = f"{row['prompt']}, {row['horizon']}"
    yield from unlike(f"{where}: separated", row["separated"], native != branch)
    yield from unlike(f"{where}: tokens", len(studies.parse_ids(native)), row["horizon"])
  horizons = sorted({row["horizon"] for row in rows})
  again = breadth_protocol.summary_rows(breadth_protocol.follow(prompts, rows, horizons))
  bare = [{name: row[name] for name in again[0]} for row in summary]
  yield from unlike("summary", bare, again)


@check(tables.TRAJECTORIES, tables.PERSISTENT, tables.CANONICAL)
def persistent_schedules(study, rows, summary, canonical) -> Found:
  prompts = [p.id for p in study.prompts or prompt_sets.DEPTH]
  schemes = [s.name for s in persistent.SCHEMES]
  for row in rows:
    tokens = studies.parse_ids(row["tokens"])
    where = f"{row['prompt']}, {row['scheme']}, {row['request']}"
    yield from unlike(f"{where}: sha256", row["tokens_sha256"], tokens_sha256(tokens))
    bit, route = (
      [int(x) for x in (row[name] or "").split(":") if x] for name in ("first_bit", "first_route")
    )
    yield from unlike(
      f"{where}: first_route", row["first_route"] is None, row["routes_like_native"]
    )
    if route and not (bit and bit < route):
      yield f"{where}: routes change at {row['first_route']}, outputs first at {row['first_bit']}"
  kinds = {name: sum(row["kind"] == name for row in rows) for name in ("schedule", "native")}
  wanted = len(prompts) * len(schemes) * schedule_runs.REQUESTS
  yield from unlike("trajectories", kinds, {"schedule": wanted, "native": len(prompts)})
  again = persistent.ablation_rows(rows, prompts)
  bare = [{name: row[name] for name in again[0]} for row in summary]
  yield from unlike("summary", bare, again)
  native = {row["prompt"]: row for row in rows if row["kind"] == "native"}
  for row in rows:
    # Where native is another arithmetic, C may still come to the same text.
    if row["scheme"] == "C" and row["certified"] == row["combines"] and native_is_c(study):
      same = row["tokens_sha256"] == native[row["prompt"]]["tokens_sha256"]
      where = f"{row['prompt']}, {row['request']}: certified, and like native"
      yield from unlike(where, same and row["routes_like_native"], True)
  identity = {(r["prompt"], r["scheme"]): r for r in rows if r["kind"] == "identity"}
  for row in canonical:
    mine, other = identity[row["prompt"], row["scheme"]], native[row["prompt"]]
    differ = mine["tokens_sha256"] != other["tokens_sha256"]
    yield from unlike(f"canonical {row['prompt']}: tokens_differ", row["tokens_differ"], differ)
    routes = not mine["routes_like_native"]
    yield from unlike(f"canonical {row['prompt']}: routes_differ", row["routes_differ"], routes)


def native_is_c(study) -> bool:
  """Whether C is the native arithmetic, so that certified combines must agree."""
  contract = study.model.module.contract(study.mode)
  return (contract.operand, contract.accumulator) == ("bfloat16", "float32")


@check(tables.C_INTERMEDIATE)
def c_intermediate(study, rows) -> Found:
  for row in rows:
    yield from unlike(f"{row['prompt']}: missing", row["missing"], 0)
    yield from unlike(f"{row['prompt']}: records", row["records"], 4 * row["schedules"])
    if row["certified"] and native_is_c(study):
      yield from unlike(f"{row['prompt']}: equal", row["equal"], row["schedules"])


@check(tables.CERTIFICATE)
def certificate(study, rows) -> Found:
  for scheme, mine in grouped(rows, "scheme").items():
    total = [row for row in mine if row["layer"] == -1]
    layers = [row for row in mine if row["layer"] >= 0]
    yield from unlike(f"{scheme}: layers", len(layers), len(study.model.config.moe_layers))
    for name in ("combines", "elements", "certified", "invariant", "whole"):
      yield from unlike(f"{scheme}: {name}", total[0][name], sum(row[name] for row in layers))
    for row in mine:
      yield from unlike(f"{scheme}, {row['layer']}: false_proofs", row["false_proofs"], 0)


@check(tables.MEDIATION)
def mediation(study, rows) -> Found:
  for row in rows:
    where = f"{row['reduction']} {row['scheme']}"
    yield from unlike(f"{where}: interpretable", row["interpretable"], row["d_qf"] > 0)
    if row["interpretable"]:
      share = (row["d_qf"] - row["d_qp"]) / row["d_qf"]
      if abs(share - row["routed_share"]) > 1e-9:
        yield f"{where}: routed_share is {row['routed_share']}, expected {share}"


if __name__ == "__main__":
  studies.main(run)
