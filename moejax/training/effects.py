"""What a nano model is good for: its losses, its text, and the size of the effects in it.

Each function measures one thing with the project's own functions and returns plain numbers, for a
model card and for tests.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moejax.analysis.bootstrap import cluster_bootstrap, Estimate, mean, ratio_of_sums
from moejax.checkpoints import LoadedModel
from moejax.combine import B
from moejax.inference import fork_farthest, four_run, generate, KvQuantization, score
from moejax.models import Mode, Taps

_FAST = Mode("fast")


def mean_nll(model: LoadedModel, tokens: np.ndarray, mode: Mode = _FAST, rows: int = 8):
  """float64 [n]: the mean loss, nats per token, of each window of int32 [n, T]."""
  parts = [
    score(model, tokens[at : at + rows], mode=mode).nll.mean(axis=1, dtype=np.float64)
    for at in range(0, len(tokens), rows)
  ]
  return np.concatenate(parts)


def distinct_share(tokens: Sequence[int], n: int = 3) -> float:
  """The share of n-grams that occur for the first time."""
  grams = list(zip(*(tokens[at:] for at in range(n))))
  return len(set(grams)) / len(grams)


def continuations(model: LoadedModel, prompts: Sequence[str], num_tokens: int = 64):
  """Greedy text: {"prompt", "text", "distinct_trigrams"} of each prompt."""
  ids = [model.tokenizer.encode(prompt) for prompt in prompts]
  tokens = generate(model, ids, num_tokens).tokens
  return [
    dict(
      prompt=prompt,
      text=model.tokenizer.decode(row.tolist()),
      distinct_trigrams=round(distinct_share(row.tolist()), 3),
    )
    for prompt, row in zip(prompts, tokens)
  ]


def distinct_trigrams(model: LoadedModel, prompts: Sequence[str]) -> dict[str, Any]:
  """Share of distinct trigrams in greedy text, the mean over prompts."""
  shares = [row["distinct_trigrams"] for row in continuations(model, prompts)]
  return dict(prompts=len(prompts), distinct_trigrams=round(float(np.mean(shares)), 3))


def fork_counts(
  model: LoadedModel, prompts: Sequence[str], layer: int, horizons: Sequence[int] = (8, 16, 32)
) -> dict[str, Any]:
  """How many continuations one fork under scheme B changes within each horizon."""
  ids = [model.tokenizer.encode(prompt) for prompt in prompts]
  forks = fork_farthest(model, ids, layer, B, max(horizons), key=jax.random.key(0))
  return dict(
    layer=layer,
    prompts=len(prompts),
    orders=forks.num_orders,
    sampled=forks.sampled,
    changed={h: int(forks.changed(h).sum()) for h in horizons},
    mean_linf=float(forks.linf.mean()),
  )


def cache_quantisation(
  model: LoadedModel, tokens: np.ndarray, bits: int, prefill: int = 64
) -> dict[str, Any]:
  """The four-run contrast of a simulated KV cache of some bits, on windows int32 [n, T].

  Sequences are the clusters of the intervals. A flip is a changed set of experts where a router
  decides; "routed_fraction" is the RMF of the route study.
  """
  runs = four_run(model, tokens, KvQuantization(bits), prefill=prefill)
  total = runs.total.mean(axis=1)
  compute = runs.compute.mean(axis=1)
  routers = model.config.router_layers
  flips = runs.flips()[routers].mean(axis=(1, 2))
  excess = cluster_bootstrap(mean, total)
  return dict(
    bits=bits,
    sequences=len(tokens),
    scored_tokens=int(runs.cc.nll.size),
    clean_nll=float(runs.cc.nll.mean(dtype=np.float64)),
    excess=_numbers(excess),
    excess_pinned=_numbers(cluster_bootstrap(mean, compute)),
    # A ratio to something that may be zero is no number.
    routed_fraction=_numbers(cluster_bootstrap(ratio_of_sums, total - compute, total))
    if excess.low > 0
    else None,
    flip_rate=float(flips.mean()),
    flip_rate_by_layer={layer: round(float(rate), 4) for layer, rate in zip(routers, flips)},
  )


def _numbers(estimate: Estimate) -> list[float]:
  return [round(x, 6) for x in (estimate.value, estimate.low, estimate.high)]


def arithmetic_agreement(model: LoadedModel, tokens: np.ndarray, rows: int = 8) -> dict[str, float]:
  """How fast arithmetic compares with canonical on windows int32 [n, T], given their tokens.

  Routes are compared as sets, per token and layer.
  """
  nll, same_routes = [], []
  for at in range(0, len(tokens), rows):
    pair = [
      score(model, tokens[at : at + rows], mode=mode, taps=Taps(ids=True))
      for mode in (Mode(), _FAST)
    ]
    nll.append([s.nll.mean(dtype=np.float64) for s in pair])
    ids = [np.asarray(s.trace["ids"]) for s in pair]
    same_routes.append((ids[0] == ids[1]).all(axis=-1).mean())
  nll = np.mean(nll, axis=0)
  return dict(
    canonical_nll=round(float(nll[0]), 6),
    fast_nll=round(float(nll[1]), 6),
    difference=round(float(nll[1] - nll[0]), 6),
    same_routes=round(float(np.mean(same_routes)), 4),
  )


def first_divergence(model: LoadedModel, prompts: Sequence[str], num_tokens: int = 64):
  """Greedy text in fast arithmetic against canonical: tokens before they part, per prompt.

  Prompts whose texts are equal throughout count `num_tokens`.
  """
  ids = [model.tokenizer.encode(prompt) for prompt in prompts]
  a, b = (generate(model, ids, num_tokens, mode=mode).tokens for mode in (Mode(), _FAST))
  differs = a != b
  return np.where(differs.any(axis=1), differs.argmax(axis=1), num_tokens).tolist()
