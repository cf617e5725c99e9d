"""How much of a reduction goes through routing: native routes pinned, perturbed ones moved.

    python -m experiments.reduction.mediation --model=dsv4-nano --out=out/reduction

The four-run design of the route study with the contract as the disturbance, on native greedy texts
of 50 prompts: a layer-static schedule at every combine, an order of its own at every combine and
token, and one combine at the fork layer. mediation.tsv. Two minutes for a nano model.
"""

import jax.numpy as jnp
import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import study as studies
from moejax import combine
from moejax.analysis import cluster_bootstrap
from moejax.analysis.bootstrap import mean, ratio_of_sums
from moejax.inference import Condition, four_run, FourRun, generate, Given, run_routed
from moejax.models import Execution
from moejax.report import reduction_tables as tables

TOKENS = 65  # of a sequence, prompt included; one more than is read
ROWS = 10
SCHEMES = {
  "persistent": ("P32", "C", "A", "B"),
  "dynamic": ("B",),
  "fork": ("P32", "A", "B"),
}


def check(study: studies.Study) -> None:
  """Refuses a study that has no intervals."""
  if study.prompts is not None and len(study.prompts) < 2:
    raise ValueError(
      "mediation: expected at least 2 prompts, the clusters of its intervals, got 1."
    )


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  check(study)
  prompts = [study.encode(prompt) for prompt in study.prompts or prompt_sets.BREADTH]
  tokens = native_texts(study, prompts)
  cc = run_routed(study.model, tokens, Condition(study.mode), prefill=1, rows=ROWS, keep=True)
  cases = [(kind, name) for kind, names in SCHEMES.items() for name in names]
  rows = []
  for kind, name in study.progress(cases, "mediation"):
    what = execution(study, prompts, kind, combine.named(name))
    idle = execution(study, prompts, kind, None)
    found = four_run(
      study.model,
      tokens,
      Given(f"{kind} {name}", Condition(study.mode, what), Condition(study.mode, idle)),
      cc,
      mode=study.mode,
      prefill=1,
      rows=ROWS,
      divergence=True,
      controls=ROWS,
    )
    rows.append(dict(reduction=kind, scheme=name, **measure(study, prompts, found)))
  study.write(tables.MEDIATION, rows, "mediation")
  return [describe(row) for row in rows]


def native_texts(study: studies.Study, prompts: list[list[int]]) -> np.ndarray:
  """int32 [B, TOKENS]: each prompt with its native greedy continuation, cut to one length."""
  room = TOKENS - min(map(len, prompts))
  if max(map(len, prompts)) >= TOKENS - 1:
    raise ValueError(f"mediation: a prompt is longer than the {TOKENS} tokens of a sequence.")
  made = generate(study.model, prompts, room, mode=study.mode).tokens
  return np.array([[*p, *row][:TOKENS] for p, row in zip(prompts, made)], np.int32)


def execution(
  study: studies.Study, prompts, kind: str, scheme: combine.Contract | None
) -> Execution:
  """The orders of request b at every combine of row b, or at one; native where scheme is None."""
  config, time = study.model.config, TOKENS - 1
  codes = np.full((config.num_layers, len(prompts), time), -1, np.int32)
  orders = np.full((*codes.shape, config.top_k), -1, np.int32)
  for row, prompt in enumerate(prompts):
    if scheme is None:
      continue
    numbers = (study.seed, row, config.num_layers)
    where = (slice(None), row)
    if kind == "dynamic":
      chosen = combine.dynamic_schedule(*numbers, time, config.top_k)
    else:
      chosen = combine.schedule(*numbers, config.top_k)[:, None]
    if kind == "fork":
      where = (study.fork_layer, row, len(prompt))
      chosen = chosen[study.fork_layer, 0]
    codes[where], orders[where] = scheme.code, chosen
  return Execution(codes=jnp.asarray(codes), orders=jnp.asarray(orders))


def measure(study: studies.Study, prompts, found: FourRun) -> dict:
  """Columns of mediation: over the tokens that were generated, sequences are the clusters."""
  position = np.arange(TOKENS - 1)[None]
  # The prediction at position p is of token p + 1.
  own = position + 1 >= np.array([[len(prompt)] for prompt in prompts])
  per_sequence = lambda x: np.where(own, x, 0.0).sum(axis=1, dtype=np.float64)
  qf, qp, ct = (per_sequence(run.kl) for run in (found.qf, found.qp, found.ct))
  count = int(own.sum())
  share = (None, None, None)
  if qf.sum() > 0:
    # A resample may hold no sequence that changed at all.
    estimate = cluster_bootstrap(ratio_of_sums, qf - qp, qf + np.finfo(float).tiny)
    share = (estimate.value, estimate.low, estimate.high)
  nll = cluster_bootstrap(mean, per_sequence(found.total) / own.sum(axis=1))
  routers = study.model.config.router_layers
  return dict(
    sequences=len(prompts),
    tokens=count,
    d_qf=float(qf.sum() / count),
    d_qp=float(qp.sum() / count),
    d_ct=float(ct.sum() / count),
    routed_share=share[0],
    routed_share_low=share[1],
    routed_share_high=share[2],
    transplant_share=float(ct.sum() / qf.sum()) if qf.sum() > 0 else None,
    flip_rate=float(found.flips()[routers][:, own].mean()),
    nll_difference=nll.value,
    nll_low=nll.low,
    nll_high=nll.high,
    interpretable=bool(qf.sum() > 0),
  )


def describe(row: dict) -> str:
  """One line of a row."""
  what = f"mediation, {row['reduction']} {row['scheme']}: KL {row['d_qf']:.3g} nats per token"
  if not row["interpretable"]:
    return f"{what}: nothing changed, no share"
  low, high = row["routed_share_low"], row["routed_share_high"]
  return f"{what}, through routing {row['routed_share']:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
  studies.main(run)
