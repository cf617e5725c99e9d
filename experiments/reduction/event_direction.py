"""Event direction: which way a story turns, by a rule, by people who label blind, and replayed.

    python -m experiments.reduction.event_direction --model=dsv4-nano --out=out/reduction
    python -m experiments.reduction.event_direction ... --resume --annotations=alice.csv,bob.csv

The first call sweeps all classes for a Chinese prompt, labels the unique eight-token texts by the
rule of configs/event_direction.py, writes annotation_blind.csv to be filled in by people (who see
neither classes nor frequencies nor the rule), draws five classes from each direction, extends them
to 64 tokens and runs each twice more alone, in fresh processes with 1 and 2 threads. The second
call scores filled-in copies of the form. event_direction_*.tsv, replay_*.tsv, and with forms
human_annotation_*.tsv; figures/directions.*. Two minutes for a nano model.
"""

from collections.abc import Sequence
import pathlib

from absl import flags
import numpy as np

from configs import event_direction as direction
from configs import prompts as prompt_sets
from experiments.reduction import branch_sweep
from experiments.reduction import study as studies
from experiments.reduction.single_run import run_alone
from moejax import inference
from moejax.analysis import agreement, annotation, tokens_sha256
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables
from moejax.report.reduction_figures import draw_alluvial

_ANNOTATIONS = flags.DEFINE_list("annotations", [], "Filled-in copies of annotation_blind.csv.")

SHORT, LONG = 8, 64
PER_DIRECTION = 5
# Of the replays, each in a fresh process.
THREADS = (1, 2)


def run(study: studies.Study, annotations: Sequence[str] = ()) -> list[str]:
  """Writes the tables, with forms filled in by people if there are any; returns what to say."""
  prompt = (study.prompts or prompt_sets.DEPTH)[-1]
  found = branch_sweep.sweep(study, prompt, study.scheme, study.horizon or SHORT)
  key, form, provisional = items(study, found)
  forms = [annotation.read_form(path, form) for path in annotations]
  people = consensus_of(forms)
  counts = count_rows(study, prompt, key, [provisional], "rule")
  counts += count_rows(study, prompt, key, forms, "people") if forms else []
  study.write(tables.EVENT_COUNTS, counts, "event_direction")
  unique = unique_rows(study, prompt, found, key, provisional, people)
  study.write(tables.EVENT_UNIQUE, unique, "event_direction")
  if forms:
    score(study, provisional, dict(zip(annotations, forms)))
  flows = [
    ((str(row.class_id), row.text, label.label or label.status), row.orders)
    for row, label in zip(key, annotation.label_classes(forms or [provisional], key))
  ]
  draw_alluvial(study.out / "figures" / "directions", (("class", "text", "direction"), flows))
  drawn, strata = draw(key, provisional)
  lines = replay(study, prompt, found, drawn, strata)
  by_rule = ", ".join(
    f"{c['class_count']} {c['label']}" for c in counts if c["source"] == "rule" and c["label"]
  )
  return [f"event direction, by rule: {by_rule} of {len(key)} classes, {len(form)} texts", *lines]


def items(study: studies.Study, found: inference.Sweep):
  """(class → text, the blind form, the rule's labels); the form and the map are written."""
  weight = branch_sweep.weight(found)
  key = [
    annotation.ClassText(number, weight, study.text(tokens))
    for number, tokens in enumerate(found.tokens)
  ]
  form = annotation.blind_form([row.text for row in key], study.seed)
  blind = study.out / "annotation_blind.csv"
  if not blind.exists():  # someone may have written into it
    annotation.write_form(blind, form)
  number = {item.text: item.item for item in form}
  pairs = [(row.class_id, number[row.text]) for row in key]
  annotation.write_csv(study.out / "annotation_map.csv", ("class", "item"), pairs)
  return key, form, annotation.apply_rule(form, direction.rule)


def consensus_of(forms) -> list[str | None] | None:
  """The label that all people give each item, or None for none."""
  if not forms:
    return None
  columns = {str(number): [row.label for row in form] for number, form in enumerate(forms)}
  return [label or None for label in agreement.consensus(columns)]


def count_rows(study: studies.Study, prompt, key, forms, source: str) -> list[dict]:
  """Of event_direction_counts."""
  paper = {"rule": "provisional", "people": "consensus"}[source]
  return [
    dict(
      prompt=prompt.id,
      scheme=study.scheme.name,
      source=source,
      status=count.status,
      label=count.label or None,
      class_count=count.classes,
      classes=len(key),
      order_count=count.orders,
      orders=sum(row.orders for row in key),
      paper=paper_figures.beside("event_direction_counts", count.label, f"{paper}_classes"),
    )
    for count in annotation.score_forms(forms, key)
  ]


def unique_rows(study, prompt, found, key, provisional, people) -> list[dict]:
  """Of event_direction_unique_continuations."""
  rows = []
  for at, item in enumerate(provisional):
    classes = [row.class_id for row in key if row.text == item.text]
    rows.append(
      dict(
        prompt=prompt.id,
        scheme=study.scheme.name,
        item=item.item,
        class_count=len(classes),
        classes=len(key),
        provisional=item.label,
        consensus=people[at] if people else None,
        tokens_sha256=tokens_sha256(found.tokens[classes[0]]),
        text=item.text,
      )
    )
  return rows


def score(study: studies.Study, provisional, forms: dict) -> None:
  """Agreement and confusion of people, forms by file, and of each with the rule."""
  columns = {"rule": [row.label for row in provisional]}
  for path, form in forms.items():
    columns[pathlib.Path(path).stem] = [row.label for row in form]
  if len(columns) <= len(forms):
    raise ValueError("annotations: two files have the same name, or one is named rule.")
  nothing = lambda x: None if np.isnan(x) else x
  rows = [
    row._asdict() | dict(raw=nothing(row.raw), kappa=nothing(row.kappa))
    for row in agreement.pairwise_agreement(columns)
  ]
  study.write(tables.AGREEMENT, rows, "event_direction")
  pairs = [row._asdict() for row in agreement.confusion(columns)]
  study.write(tables.CONFUSION, pairs, "event_direction")


def draw(key, provisional) -> tuple[list[int], dict[int, str]]:
  """(classes drawn, what each was drawn from): five of each direction; where a direction has fewer,
  of the two most frequent texts instead, and said so.
  """
  label = {row.text: row.label for row in provisional}
  labels = {row.class_id: label[row.text] for row in key}
  texts = [row.text for row in key]
  if any(list(labels.values()).count(name) < PER_DIRECTION for name in direction.WORDS):
    common = sorted(set(texts), key=lambda text: (-texts.count(text), texts.index(text)))[:2]
    names = {text: f"other, text {number}" for number, text in enumerate(common, start=1)}
    labels = {row.class_id: names.get(row.text, "other") for row in key}
    strata = list(names.values())
  else:
    strata = list(direction.WORDS)
  sizes = {name: list(labels.values()).count(name) for name in strata}
  strata = [name for name in strata if sizes[name] >= PER_DIRECTION] or strata
  # A model of few classes or texts has no ten of them.
  size = min(PER_DIRECTION * 2 // len(strata), *(sizes[name] for name in strata))
  drawn = annotation.stratified_draw(labels, strata, seed=studies.DRAW_SEED, per_stratum=size)
  return drawn, labels


def replay(study: studies.Study, prompt, found: inference.Sweep, drawn, strata) -> list[str]:
  """Extends the drawn classes, runs each twice alone, and writes the replay tables."""
  ids, scheme = study.encode(prompt), study.scheme
  event = study.freeze(prompt, LONG)
  orders = found.fork.orders[drawn]
  long = inference.branch_sweep(study.model, event, scheme, LONG, orders=orders, mode=study.mode)
  short = found.tokens.shape[1]
  rows = [
    dict(
      prompt=prompt.id,
      scheme=scheme.name,
      branch=branch,
      order=studies.ids(orders[at]),
      label=strata[branch],
      num_tokens=LONG,
      prefix_equal=bool((long.tokens[at, :short] == found.tokens[branch]).all()),
      tokens=studies.ids(long.tokens[at]),
      tokens_sha256=tokens_sha256(long.tokens[at]),
      text=study.text(long.tokens[at]),
    )
    for at, branch in enumerate(drawn)
  ]
  study.write(tables.REPLAY_BRANCHES, rows, "event_direction")
  jobs = [dict(scheme=scheme.name, order=order.tolist()) for order in orders]
  runs = run_alone(study, ids, LONG, jobs, THREADS)
  pairs = pair_rows(long, drawn, runs)
  study.write(tables.REPLAY_PAIRS, pairs, "event_direction")
  environment = [
    dict(run=number, name=name, value=str(value))
    for number, result in enumerate(runs)
    for name, value in environment_of(result["record"]).items()
  ]
  study.write(tables.REPLAY_ENVIRONMENT, environment, "event_direction")
  good = sum(row["tokens_equal"] and row["like_sweep"] for row in pairs)
  return [f"deterministic replay: {good} of {len(pairs)} branches equal in 2 fresh processes"]


def environment_of(record: dict) -> dict:
  """The measured properties of a run's environment, and what it ran."""
  names = ("model", "weights_sha256", "tokenizer_sha256")
  return {**{name: record[name] for name in names}, **record["environment"]}


def pair_rows(long: inference.Sweep, drawn, runs: list[dict]) -> list[dict]:
  """Of replay_pairs."""
  same = lambda name: runs[0]["record"][name] == runs[1]["record"][name]
  names = ("weights_sha256", "tokenizer_sha256", "contract", "mode")
  rows = []
  for at, branch in enumerate(drawn):
    first, second = (result["tokens"][at] for result in runs)
    hashes = tokens_sha256(first), tokens_sha256(second)
    rows.append(
      dict(
        branch=branch,
        runs=len(runs),
        num_tokens=len(first),
        tokens_equal=bool((first == second).all()),
        like_sweep=all((result["tokens"][at] == long.tokens[at]).all() for result in runs),
        sha256_equal=hashes[0] == hashes[1],
        metadata_equal=all(map(same, names)),
        exit_zero=all(result["exit"] == 0 for result in runs),
        first_sha256=hashes[0],
        second_sha256=hashes[1],
      )
    )
  return rows


if __name__ == "__main__":
  studies.main(lambda study: run(study, _ANNOTATIONS.value))
