"""What a byte buys: clean routes of the prefix, or the prefix's cache at 8 bits instead of 4.

    python -m experiments.route.exchange_rate --model=olmoe-nano --out=out/route

exchange_rate.tsv. Ten seconds for a nano model.
"""

import dataclasses

import numpy as np

from experiments.route import study as studies
from experiments.route.measure import estimate, share_of
from moejax.inference import KvQuantization
from moejax.models import Config
from moejax.report import route_tables as tables

TABLES = (tables.EXCHANGE_RATE,)
BAR = 0.5  # of what precision recovers, registered before the run
WEIGHT_BITS = 16
FROM, TO = 4, 8


def route_bytes(config: Config) -> float:
  """Of stored routes, per token and layer: ids and BF16 weights of the selected experts."""
  bits_of_id = (config.num_experts - 1).bit_length()
  return config.top_k * (bits_of_id + WEIGHT_BITS) / 8


def precision_bytes(config: Config) -> float:
  """Of 8 bits instead of 4 in a cache of keys and values, per token and layer."""
  return 2 * config.num_kv_heads * config.head_dim * (TO - FROM) / 8


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  if study.disturbance != KvQuantization(FROM):
    return [f"exchange rate: skipped, it prices {FROM} bits, not {study.disturbance.name}"]
  four, prefix = study.four, np.arange(study.length - 1) < study.prefill
  bits = np.where(prefix, TO, FROM).astype(np.int32)[None, None]
  execution = study.disturbed.execution.replace(kv_bits=bits)
  losses = dict(
    routes=study.run(study.disturbed, study.clean.pins(prefix[None, None])).nll,
    precision=study.run(dataclasses.replace(study.disturbed, execution=execution)).nll,
  )
  shared = study.model.family == "deepseek_v4"  # one vector is key and value
  costs = dict(
    routes=route_bytes(study.model.config),
    precision=precision_bytes(study.model.config) / (2 if shared else 1),
  )
  rows = []
  for arm, loss in losses.items():
    recovered = four.qf.nll.astype(np.float64) - loss
    share = share_of(recovered, four.route_forward, study.seed)
    rows.append(
      dict(
        arm=arm,
        bytes=costs[arm],
        **estimate("recovery", share),
        recovery_per_byte=None if share is None else share.value / costs[arm],
        bar=None,
        ratio=None,
        paper=study.paper("exchange_rate", arm, "recovery"),
      )
    )
  routes, precision = rows
  if routes["recovery"] is None:
    study.write(tables.EXCHANGE_RATE, rows, "exchange_rate")
    return ["exchange rate: NOT INTERPRETABLE, no routed ceiling"]
  verdict = "NOT INTERPRETABLE"
  if precision["recovery_low"] > 0:
    routes["bar"] = BAR * precision["recovery"]
    routes["ratio"] = routes["recovery_per_byte"] / precision["recovery_per_byte"]
    verdict = "reached" if routes["recovery"] >= routes["bar"] else "NOT reached"
  study.write(tables.EXCHANGE_RATE, rows, "exchange_rate")
  return [
    f"exchange rate: routes {routes['recovery']:.2f} for {routes['bytes']:g} bytes, 8 bits "
    f"{precision['recovery']:.2f} for {precision['bytes']:g}; half of it: {verdict}"
  ]


if __name__ == "__main__":
  studies.main(run)
