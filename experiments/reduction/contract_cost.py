"""What each contract costs: the combine alone, and a decode step of the model, against native.

    python -m experiments.reduction.contract_cost --model=dsv4-nano --out=out/reduction

Contestants take turns in random order in one process. contract_cost.tsv. A minute.
"""

import jax
import jax.numpy as jnp
import numpy as np

from configs import prompts as prompt_sets
from experiments import timing
from experiments.reduction import study as studies
from moejax import combine
from moejax.inference import decode, prefill
from moejax.inference.batches import state_length
from moejax.inference.sweep import spread
from moejax.models import Execution
from moejax.report import reduction_tables as tables

SCHEMES = ("native", "P32", "C", "A", "B", "EXACT")
ROWS = 64
SECONDS = 4.0


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  rows = combine_rows(study) + decode_rows(study)
  study.write(tables.CONTRACT_COST, rows, "contract_cost")
  return [
    f"cost, {row['what']}, {row['scheme']}: {row['median_ms']:.3g} ms, {row['ratio']:.3f} of native"
    for row in rows
  ]


def combine_rows(study: studies.Study) -> list[dict]:
  """The sum alone, on random terms of the model's shape: its own bytes and adds."""
  config = study.model.config
  shape = (ROWS * 64, config.top_k, config.hidden_size)
  terms = jax.random.normal(study.key(0), shape, jnp.float32)
  order = jnp.broadcast_to(jnp.arange(config.top_k, dtype=jnp.int32)[None], shape[:2])
  native = study.model.module.contract(study.mode).code

  def contestant(name):
    code = native if name == "native" else combine.named(name).code
    codes = jnp.full(shape[0], code, jnp.int32)
    call = jax.jit(combine.combine_rows)
    return lambda: call(terms, order, codes)

  times = timing.compare({name: contestant(name) for name in SCHEMES}, SECONDS)
  size = terms.nbytes + shape[0] * shape[2] * 4
  return _rows("combine", times, shape, size)


def decode_rows(study: studies.Study) -> list[dict]:
  """One token of 64 rows through the whole model, every combine under the contract."""
  model = study.model
  ids = study.encode(prompt_sets.DEPTH[0])
  _, state, _ = prefill(model, [ids], state_length(len(ids) + 1), mode=study.mode)
  state = spread(state, ROWS)
  shape = (1, 1, 1)

  def contestant(name):
    code = -1 if name == "native" else combine.named(name).code
    execution = Execution(codes=jnp.full(shape, code, jnp.int32))
    return lambda: decode(model, np.full(ROWS, ids[-1]), state, execution, mode=study.mode)[0]

  times = timing.compare({name: contestant(name) for name in SCHEMES}, SECONDS)
  config = model.config
  size = sum(x.nbytes for x in jax.tree.leaves((model.params, state)))
  return _rows("decode", times, (ROWS, config.top_k, config.hidden_size), size)


def _rows(what: str, times: dict[str, list[float]], shape, size: int) -> list[dict]:
  base = np.array(times["native"])
  return [
    dict(
      what=what,
      scheme=name,
      rows=shape[0],
      terms=shape[1],
      hidden=shape[2],
      median_ms=float(1e3 * np.median(measured)),
      ratio=float(np.median(np.array(measured) / base)),
      bytes=size,
    )
    for name, measured in times.items()
  ]


if __name__ == "__main__":
  studies.main(run)
