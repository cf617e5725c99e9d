"""The card of a nano model: everything that is claimed of it, measured, and the page that says so.

`measure` gives plain numbers, which are kept as card.json; `render` makes README.md of them, in the
layout of Hugging Face's model cards.
"""

from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any

import numpy as np

from moejax.analysis.ngrams import count, Ngrams
from moejax.checkpoints import LoadedModel
from moejax.data import passages, read_corpus, Windows, windows
from moejax.models.parameters import num_active_parameters, num_parameters
from moejax.training import effects
from moejax.training.stream import TokenStream

WINDOW = 256
PREFILL = 64
_WINDOWS = 32  # of each source
_FORK_LAYER = 5
_CACHE_BITS = (4, 8, 3)


def measure(
  model: LoadedModel,
  corpus: str | os.PathLike,
  stream: TokenStream,
  replay: Sequence[str],
  breadth: Sequence[str],
) -> dict[str, Any]:
  """Every number of the card. The test split of the corpus is not read.

  Args:
    model: a checkpoint with training.json.
    corpus: its calibration split is read.
    stream: the training text, for the n-gram models.
    replay: prompts to continue and print.
    breadth: prompts to fork, and to continue for the share of distinct trigrams.
  """
  ngrams = count(stream.tokens, model.config.vocab_size)
  ours = windows(passages("calibration"), model.tokenizer, WINDOW, num=96, seed=0)
  training = json.loads((model.directory / "training.json").read_text(encoding="utf-8"))
  manifest = json.loads(pathlib.Path(corpus, "manifest.json").read_text(encoding="utf-8"))
  web = windows(
    read_corpus(corpus, "calibration", sources=["en_wikitext_test", "en_c4_validation"]),
    model.tokenizer,
    WINDOW,
    num=96,
    seed=0,
  )
  return dict(
    name=model.name,
    family=model.family,
    parameters=num_parameters(model.config),
    active_parameters=num_active_parameters(model.config),
    training=training,
    sources={
      name: dict(language=entry["lang"], licence=entry["licence"])
      for name, entry in manifest["sources"].items()
      if "train" in entry["splits"]
    },
    losses=_losses(model, corpus, ngrams),
    continuations=effects.continuations(model, replay),
    breadth=effects.distinct_trigrams(model, breadth),
    forks=effects.fork_counts(model, breadth, _FORK_LAYER),
    cache=[effects.cache_quantisation(model, ours.tokens, bits, PREFILL) for bits in _CACHE_BITS],
    cache_on_web_text=effects.cache_quantisation(model, web.tokens, 4, PREFILL),
    arithmetic=effects.arithmetic_agreement(model, ours.tokens),
    first_divergence=effects.first_divergence(model, replay),
  )


def _losses(model: LoadedModel, corpus, ngrams: Ngrams) -> list[dict[str, Any]]:
  """A row for each source with enough held-out text, and for our passages by language."""
  rows = []
  by_source: dict[str, list] = {}
  for document in read_corpus(corpus, "calibration"):
    by_source.setdefault(document.source, []).append(document)
  for source, documents in by_source.items():
    every = windows(documents, model.tokenizer, WINDOW) if _long_enough(model, documents) else None
    if every is not None and len(every.tokens) >= 8:
      some = np.random.default_rng(0).permutation(len(every.tokens))[:_WINDOWS]
      rows.append(_loss_row(model, ngrams, source, documents[0].language, every.tokens[some]))
  for split in ("calibration", "held_out"):
    for language in ("en", "zh"):
      own: Windows = windows(passages(split, language), model.tokenizer, WINDOW)
      rows.append(_loss_row(model, ngrams, f"passages, {split}", language, own.tokens))
  return rows


def _long_enough(model: LoadedModel, documents) -> bool:
  return any(len(model.tokenizer.encode(document.text)) >= WINDOW for document in documents)


def _loss_row(model, ngrams: Ngrams, source: str, language: str, tokens: np.ndarray):
  return dict(
    source=source,
    language=language,
    windows=len(tokens),
    model=round(float(effects.mean_nll(model, tokens).mean()), 4),
    bigram=round(float(ngrams.bigram_nll(tokens).mean()), 4),
    unigram=round(float(ngrams.unigram_nll(tokens).mean()), 4),
  )


def margin(card: dict[str, Any], language: str) -> float:
  """The least by which the model beats the bigram model on a source of a language, in nats."""
  return min(r["bigram"] - r["model"] for r in card["losses"] if r["language"] == language)


def history(previous: dict[str, Any]) -> list[dict[str, Any]]:
  """What a card keeps of the checkpoints before it, given that of the last one; oldest first."""
  training, four = previous["training"], previous["cache"][0]
  losses = {
    r["language"]: r["model"] for r in previous["losses"] if r["source"] == "passages, held_out"
  }
  row = dict(
    tokens=training["tokens"],
    minutes=training["minutes"],
    repetition_loss=training["recipe"]["repetition_loss"],
    loss_en=losses["en"],
    loss_zh=losses["zh"],
    distinct_trigrams=round(_distinct(previous), 3),
    forks=max(previous["forks"]["changed"].values()),
    excess=four["excess"],
    routed_fraction=four["routed_fraction"],
  )
  return [*previous.get("history", []), row]


def _distinct(card: dict[str, Any]) -> float:
  return float(np.mean([c["distinct_trigrams"] for c in card["continuations"]]))


def minutes(card: dict[str, Any]) -> float:
  """Of all its training, that of the checkpoints before it included."""
  return card["training"]["minutes"] + sum(row["minutes"] for row in card.get("history", []))


def render(card: dict[str, Any]) -> str:
  """README.md of a model."""
  return "\n".join(
    [
      _head(card),
      _training(card),
      _loss_table(card),
      _effects(card),
      _texts(card),
      _sources(card),
      *([_history(card)] if card.get("history") else []),
    ]
  )


def _head(card) -> str:
  return f"""---
language: [en, zh]
license: apache-2.0
library_name: moejax
tags: [mixture-of-experts, nano, numerics]
---

# {card["name"]}

A mixture-of-experts model of {card["parameters"] / 1e6:.2f} million parameters \
({card["active_parameters"] / 1e6:.2f} million read per token) in the architecture \
`{card["family"]}`, trained by the moejax project to have effects of finite precision to study on \
any machine.

**What it is not.** It is not a published model of that family, does not behave like one, and no
number measured on it is a number of one. It writes simple sentences and knows nothing; its answers
to questions are chance. Do not use it for anything but the study of arithmetic and routing.
"""


def _training(card) -> str:
  t = card["training"]
  recipe = t["recipe"]
  return f"""## Training

{t["tokens"]:,} tokens in windows of {recipe["length"]} ({recipe["batch"]} a step) from a stream of
{t["stream_tokens"]:,}, in {minutes(card):.0f} minutes on two CPU cores that other work shared; one
seed. Muon on matrices, Adam on the rest, peak rate {recipe["peak_rate"]}. After
{recipe["repetition_from"]:.0%} of the tokens the loss also prices trigrams that repeat earlier ones
(unlikelihood, coefficient {recipe["repetition_loss"]}): greedy text of small models goes in circles
without. The last {1 - recipe["rounded_from"]:.0%} of the steps ran with weights and activations
rounded to BF16 as the family's own code rounds them. Last training loss {t["nll"]:.3f} nats per
token.
"""


def _loss_table(card) -> str:
  rows = "\n".join(
    f"| {r['source']} | {r['language']} | {r['windows']} | {r['model']:.3f} | {r['bigram']:.3f} "
    f"| {r['unigram']:.3f} |"
    for r in card["losses"]
  )
  return f"""## Held-out loss

Nats per token on windows of {WINDOW} tokens that were not trained on (calibration splits, the
project's own passages), beside a bigram (Witten-Bell) and a unigram model with the same tokenizer,
counted on the same training text.

| source | language | windows | model | bigram | unigram |
|---|---|--:|--:|--:|--:|
{rows}

The smallest margin over the bigram model is {margin(card, "en"):.2f} nats in English and
{margin(card, "zh"):.2f} in Chinese.
"""


def _effects(card) -> str:
  forks, cache = card["forks"], card["cache"]
  kind = "sampled orders" if forks["sampled"] else "orders, all there are"
  changed = ", ".join(f"{n} by {h} tokens" for h, n in forks["changed"].items())
  rows = "\n".join(
    _cache_row(name, row)
    for name, row in [
      *((f"passages, {row['bits']} bit", row) for row in cache),
      ("WikiText and C4, 4 bit", card["cache_on_web_text"]),
    ]
  )
  agree, parted = card["arithmetic"], card["first_divergence"]
  first, last = min(parted), max(parted)
  return f"""## Effects

One expert sum at layer {forks["layer"]} (of 0, 1, ...) at the first decoded token, summed under
scheme B in the farthest of {forks["orders"]} {kind}, changes the greedy continuation of
{forks["prompts"]} prompts: {changed}.

Simulated KV cache of few bits, {cache[0]["sequences"]} windows of {WINDOW} tokens, the first
{PREFILL} given. Excess in nats per token with 95 % intervals over sequences; "pinned" keeps the
clean routes; the routed fraction is what of the excess goes through routing.

| text, bits | clean loss | excess | pinned excess | routed fraction | flipped routes | by layer |
|---|--:|--:|--:|--:|--:|---|
{rows}

Fast and canonical arithmetic: mean loss {agree["fast_nll"]:.4f} and {agree["canonical_nll"]:.4f}
(difference {agree["difference"]:+.5f}); {agree["same_routes"]:.1%} of the routes are equal; greedy
texts of the {len(parted)} prompts below part after {first} to {last} of 64 tokens
({sum(p == 64 for p in parted)} do not).
"""


def _interval(x: list[float] | None) -> str:
  return "not interpretable" if x is None else f"{x[0]:.4f} [{x[1]:.4f}, {x[2]:.4f}]"


def _cache_row(name: str, row: dict[str, Any]) -> str:
  rates = row["flip_rate_by_layer"].values()
  return (
    f"| {name} | {row['clean_nll']:.3f} | {_interval(row['excess'])} | "
    f"{_interval(row['excess_pinned'])} | {_interval(row['routed_fraction'])} | "
    f"{row['flip_rate']:.1%} | {min(rates):.0%} to {max(rates):.0%} |"
  )


def _texts(card) -> str:
  texts = "\n".join(
    f"- **{c['prompt']}**{' '.join(c['text'].removeprefix(c['prompt']).splitlines())} "
    f"({c['distinct_trigrams']:.0%})"
    for c in card["continuations"]
  )
  prompts, share = card["breadth"]["prompts"], card["breadth"]["distinct_trigrams"]
  return f"""## Text

Greedy continuations of 64 tokens, canonical arithmetic, with the share of their trigrams that are
distinct; on average {_distinct(card):.0%}. Over the {prompts} prompts of the forks
above it is {share:.0%}.

{texts}
"""


def _sources(card) -> str:
  rows = "\n".join(
    f"| {name} | {s['language']} | {s['licence']} |" for name, s in card["sources"].items()
  )
  return f"""## Text it was trained on

Cleaned, de-duplicated and split by document. Some sources were themselves written by language
models (TinyStories in both languages). The weights are under Apache-2.0; the text is not part of
the project.

| source | language | licence |
|---|---|---|
{rows}
"""


def _history(card) -> str:
  rows = "\n".join(
    f"| {r['tokens']:,} | {r['minutes']:.0f} | {r['repetition_loss']:g} "
    f"| {r['loss_en']:.3f} / {r['loss_zh']:.3f} | {r['distinct_trigrams']:.0%} | {r['forks']} "
    f"| {_interval(r['excess'])} | {_interval(r['routed_fraction'])} |"
    for r in card["history"]
  )
  return f"""## History

Checkpoints that this one goes on from; each was trained with the repetition coefficient of its row
from the one before. Loss is of held-out passages; trigrams, the share of distinct ones in texts.

| tokens | minutes | repetition | loss, en / zh | trigrams | forks | 4-bit excess | routed |
|--:|--:|--:|--:|--:|--:|--:|--:|
{rows}
"""
