"""One combine in every order: distinct outputs, states, and the texts they lead to.

    python -m experiments.reduction.branch_sweep --model=dsv4-nano --out=out/reduction

Prompt "why the sheep"; all orders under A and all structural classes under B, 64 tokens each.
basin_counts.tsv, basin_rank_frequency.tsv, branches.tsv, figures/basins.*.
Under two minutes for a nano model.
"""

import functools

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import study as studies
from moejax import combine
from moejax.analysis import basins, rank_frequency, tokens_sha256
from moejax.inference import branch_sweep, Sweep
from moejax.inference.branches import outputs_of
from moejax.inference.trajectory import sha256
from moejax.numerics.bf16 import ulp_bf16_distance
from moejax.report import paper_figures
from moejax.report import reduction_tables as tables
from moejax.report.reduction_figures import draw_rank_frequency

HORIZONS = (8, 16, 32, 64)
SCHEMES = (combine.A, combine.B)


def run(study: studies.Study) -> list[str]:
  """Writes the tables; returns what to say."""
  horizons = studies.horizons(study, HORIZONS)
  counts, ranks, raw, curves, lines = [], [], [], {}, []
  for prompt in study.prompts or prompt_sets.DEPTH[:1]:
    for scheme in study.progress(SCHEMES, f"branch sweep, {prompt.id}"):
      found = sweep(study, prompt, scheme, horizons[-1])
      raw += branch_rows(study, prompt, found)
      for horizon in horizons:
        counts.append(count_row(prompt, found, horizon))
        ranks += rank_rows(study, prompt, found, horizon)
        groups = group(found, horizon)
        curves[f"{scheme.name}, {horizon} tokens"] = groups.order_counts.tolist()
      row = counts[-len(horizons)]
      texts = ", ".join(str(c["texts"]) for c in counts[-len(horizons) :])
      lines.append(
        f"{prompt.text!r}, layer {row['layer']}, {scheme.name}: {row['orders']} orders, "
        f"{row['classes']} classes, {row['outputs']} outputs, {row['states']} states; texts at "
        f"{', '.join(map(str, horizons))} tokens: {texts}"
      )
  study.write(tables.BRANCHES, raw, "branch_sweep")
  study.write(tables.BASIN_COUNTS, counts, "branch_sweep")
  study.write(tables.BASIN_RANK_FREQUENCY, ranks, "branch_sweep")
  draw_rank_frequency(study.out / "figures" / "basins", curves)
  return lines


@functools.lru_cache(maxsize=4)
def sweep(study: studies.Study, prompt, scheme, num_tokens: int) -> Sweep:
  """All branches of a prompt's event; kept for the protocols that follow."""
  key = study.key(scheme.code)
  event = study.freeze(prompt, num_tokens)
  return branch_sweep(study.model, event, scheme, num_tokens, key=key, mode=study.mode)


def weight(found: Sweep) -> int:
  """Orders that a branch stands for: two where the first pair commutes."""
  return 2 if found.fork.scheme.first_pair_commutes and not found.fork.sampled else 1


def group(found: Sweep, horizon: int):
  """The basins of a sweep."""
  number = np.arange(len(found.tokens))
  weights = np.full(len(number), weight(found))
  return basins(found.tokens, horizon, weights=weights, classes=number)


def count_row(prompt, found: Sweep, horizon: int) -> dict:
  """Of basin_counts."""
  fork, event = found.fork, found.fork.event
  groups = group(found, horizon)
  in_native = (found.tokens[:, :horizon] == found.native[None, :horizon]).all(axis=1)
  paper = ""
  if horizon == 8 and prompt == prompt_sets.DEPTH[0]:  # the paper's sweep
    paper = paper_figures.beside("basin_counts", fork.scheme.name, "texts")
  return dict(
    prompt=prompt.id,
    layer=event.layer,
    position=len(event.prompt),
    fork_token=event.token,
    scheme=fork.scheme.name,
    sampled=fork.sampled,
    orders=len(fork.orders) * weight(found),
    classes=len(fork.orders),
    outputs=len(fork.post_block),
    states=fork.num_states,
    states_unlike_native=int(fork.unlike_native.sum()),
    complete_states=len(np.unique(found.merged)),
    output_linf=float(fork.output_linf.max()),
    state_linf=float(fork.state_linf.max()),
    horizon=horizon,
    texts=len(groups.order_counts),
    native_basin_orders=int(in_native.sum()) * weight(found),
    paper_texts=paper,
  )


def rank_rows(study: studies.Study, prompt, found: Sweep, horizon: int) -> list[dict]:
  """Of basin_rank_frequency."""
  groups = group(found, horizon)
  rows = []
  for rank, basin in zip(rank_frequency(groups), groups.representatives):
    tokens = found.tokens[basin, :horizon]
    rows.append(
      dict(
        prompt=prompt.id,
        scheme=found.fork.scheme.name,
        horizon=horizon,
        rank=rank.rank,
        order_count=rank.order_count,
        orders=int(groups.order_counts.sum()),
        class_count=rank.class_count,
        classes=len(found.tokens),
        native=bool((tokens == found.native[:horizon]).all()),
        tokens_sha256=tokens_sha256(tokens),
        text=study.text(tokens),
      )
    )
  return rows


def exact_ulps(study: studies.Study, found: Sweep) -> np.ndarray:
  """int64 [R, D]: distance of each distinct output from that of the exact sum, BF16 ulps."""
  event, orders = found.fork.event, found.fork.orders[found.fork.representatives]
  contract = study.model.module.contract(study.mode)
  outputs = outputs_of(event, contract.with_scheme(found.fork.scheme), orders)
  exact = outputs_of(event, contract.with_scheme(combine.EXACT), orders[:1])
  return ulp_bf16_distance(outputs, np.broadcast_to(exact, outputs.shape))


def branch_rows(study: studies.Study, prompt, found: Sweep) -> list[dict]:
  """Of branches."""
  fork = found.fork
  ulps = exact_ulps(study, found)
  hashes = [sha256(state) for state in fork.post_block]
  return [
    dict(
      prompt=prompt.id,
      scheme=fork.scheme.name,
      branch=branch,
      order=studies.ids(fork.orders[branch]),
      weight=weight(found),
      output=int(output),
      output_linf=float(fork.output_linf[output]),
      exact_ulps_max=int(ulps[output].max()),
      exact_ulps_mean=float(ulps[output].mean()),
      state_sha256=hashes[output],
      state_linf=float(fork.state_linf[output]),
      complete_state=int(found.merged[branch]),
      tokens=studies.ids(found.tokens[branch]),
    )
    for branch, output in enumerate(fork.output)
  ]


if __name__ == "__main__":
  studies.main(run)
