"""Control of everything else: the native order, given explicitly, gives the native run's bits.

    python -m experiments.reduction.native_replay --model=dsv4-nano --out=out/reduction

13 prompts; native_replay.tsv and prompts.tsv. Under a minute for a nano model.
"""

import jax.numpy as jnp
import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import study as studies
from moejax.analysis import tokens_sha256
from moejax.inference import generate, prefill
from moejax.inference.batches import state_length
from moejax.models import Execution, Taps
from moejax.report import reduction_tables as tables

_HORIZON = 8
_TAPS = Taps(ids=True, slots=True, combined=True)


def run(study: studies.Study) -> list[str]:
  """Writes the tables; returns what to say."""
  write_prompts(study)
  model, mode = study.model, study.mode
  chosen = study.prompts or prompt_sets.REPLAY
  rows = []
  for prompt in study.progress(chosen, "native replay"):
    ids = study.encode(prompt)
    native = generate(model, [ids], study.horizon or _HORIZON, mode=mode).tokens[0]
    sequence = [*ids, *native[:-1].tolist()]
    length = state_length(len(sequence))
    plain = prefill(model, [sequence], length, mode=mode, taps=_TAPS)
    orders = plain[2]["slots"] if model.module.contract(mode).order == "slot" else None
    probe = prefill(
      model,
      [sequence],
      length,
      explicit(study, orders, len(sequence)),
      mode=mode,
      taps=_TAPS,
    )
    probed = generate(model, [ids], len(native), explicit_codes(study), mode=mode).tokens[0]
    used = (slice(None), 0, slice(len(sequence)))
    a, b = (
      {name: np.asarray(trace[name])[used] for name in trace} for trace in (plain[2], probe[2])
    )
    layers = list(model.config.moe_layers)
    same = ((a["ids"] == b["ids"]) & (a["slots"] == b["slots"])).all(axis=-1)[layers]
    rows.append(
      dict(
        prompt=prompt.id,
        positions=len(sequence),
        routes=same.size,
        routes_equal=int(same.sum()),
        tokens=len(native),
        tokens_equal=int((native == probed).sum()),
        text_equal=study.text(native) == study.text(probed),
        combined_linf=float(np.abs(a["combined"] - b["combined"]).max()),
        tokens_sha256=tokens_sha256(native),
      )
    )
  study.write(tables.NATIVE_REPLAY, rows, "native_replay")
  good = sum(
    row["routes"] == row["routes_equal"]
    and row["tokens"] == row["tokens_equal"]
    and row["text_equal"]
    and row["combined_linf"] == 0
    for row in rows
  )
  return [f"native replay: {good} of {len(rows)} prompts equal in routes, tokens, text and outputs"]


def explicit(study: studies.Study, slots, time: int) -> Execution:
  """The native contract and order of a teacher-forced row as arrays."""
  config = study.model.config
  if slots is None:
    orders = np.arange(config.top_k, dtype=np.int32)[None, None, None]
  else:
    orders = np.asarray(slots)[:, :, :time]
  return explicit_codes(study).replace(orders=jnp.asarray(orders))


def explicit_codes(study: studies.Study) -> Execution:
  """The native contract as an array; the order is the family's."""
  code = study.model.module.contract(study.mode).code
  return Execution(codes=jnp.full((1, 1, 1), code, jnp.int32))


def write_prompts(study: studies.Study) -> None:
  """The list of all prompts."""
  depth, replay = ({p.id for p in group} for group in (prompt_sets.DEPTH, prompt_sets.REPLAY))
  rows = [
    dict(
      prompt=p.id,
      language=p.language,
      kind=p.kind,
      depth=p.id in depth,
      replay=p.id in replay,
      text=p.text,
      token_ids=studies.ids(study.encode(p)),
    )
    for p in prompt_sets.BREADTH
  ]
  study.write(tables.PROMPTS, rows, "prompts")


if __name__ == "__main__":
  studies.main(run)
