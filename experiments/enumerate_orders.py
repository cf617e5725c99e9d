"""Every order of one expert combine, under each numeric contract.

    python -m experiments.enumerate_orders --random --num_terms=6 --hidden=4096 --out=out/orders
    python -m experiments.enumerate_orders --terms=terms.npz --scheme=B,C --out=out/orders

A few seconds. `--terms` is an .npz with an array `terms`, float32 [K, H]: the gated outputs of the
selected experts in ascending expert id. Written to --out: summary.tsv (one row per scheme),
orders.tsv (one row per scheme and order), spread.png, environment.json. With more than six terms a
seeded sample of orders is used (720, or 360 classes where the first pair commutes) and marked so.
"""

import dataclasses
import hashlib
import json
import os
import pathlib

from absl import app, flags
import jax
import numpy as np
from tqdm import tqdm

from moejax import combine, numerics
from moejax.report import arrays, figures, files, tables

_TERMS = flags.DEFINE_string("terms", None, "An .npz with an array `terms`, float32 [K, H].")
_RANDOM = flags.DEFINE_bool("random", False, "Standard normal terms instead of a file.")
_NUM_TERMS = flags.DEFINE_integer("num_terms", 6, "Random terms: K.", lower_bound=1, upper_bound=16)
_HIDDEN = flags.DEFINE_integer("hidden", 4096, "Random terms: H.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of random terms and of sampled orders.")
_SCHEME = flags.DEFINE_list("scheme", list(combine.SCHEMES), "Contracts to run.")
_OUT = flags.DEFINE_string("out", "out/orders", "Folder to write to.")

SUMMARY = (
  "scheme",
  "num_terms",
  "hidden",
  "num_orders",
  "sampled",
  "classes",
  "distinct_outputs",
  "certified_share",
  "invariant_share",
  "linf_min",
  "linf_max",
  "ulps_max",
  "ulps_mean",
  "terms_sha256",
  "seed",
)
ORDERS = ("scheme", "order_number", "order", "class", "output", "linf", "ulps_max", "ulps_mean")


def main(_):
  if (_TERMS.value is None) != _RANDOM.value:
    raise app.UsageError("give either --terms=FILE.npz or --random.")
  try:
    contracts = [combine.named(name) for name in _SCHEME.value]
    if _RANDOM.value:
      shape = (_NUM_TERMS.value, _HIDDEN.value)
      terms = np.random.default_rng(_SEED.value).standard_normal(shape).astype(np.float32)
    else:
      terms = arrays.load_terms(_TERMS.value)
    run(terms, contracts, pathlib.Path(_OUT.value))
  except (ValueError, TypeError) as error:
    raise SystemExit(f"enumerate_orders: {error}") from None


def run(terms, contracts, out):
  """Measures every contract and writes the tables, the picture and the environment."""
  digest = hashlib.sha256(terms.tobytes()).hexdigest()
  key = jax.random.key(_SEED.value, impl="threefry2x32")
  spreads, summary, rows = {}, [], []
  for contract in tqdm(contracts, desc="schemes", unit="scheme"):
    orders, sampled = combine.study_orders(terms.shape[0], contract, key=key)
    spread = combine.measure_spread(terms, contract, orders)
    spreads[contract.name] = spread
    summary.append(
      (
        contract.name,
        *terms.shape,
        len(orders),
        sampled,
        spread.num_classes,
        spread.num_outputs,
        f"{spread.certified.mean():.6f}",
        f"{spread.invariant.mean():.6f}",
        f"{spread.linf.min():.8g}",
        f"{spread.linf.max():.8g}",
        spread.ulps_max.max(),
        f"{spread.ulps_mean.mean():.6g}",
        digest,
        _SEED.value,
      )
    )
    numbers = combine.lexicographic_rank(orders)
    for i, order in enumerate(orders):
      rows.append(
        (
          contract.name,
          numbers[i],
          ",".join(map(str, order)),
          spread.classes[i],
          spread.outputs[i],
          f"{spread.linf[i]:.8g}",
          spread.ulps_max[i],
          f"{spread.ulps_mean[i]:.6g}",
        )
      )
  tables.write_tsv(out / "summary.tsv", SUMMARY, summary)
  tables.write_tsv(out / "orders.tsv", ORDERS, rows)
  figures.draw_spreads(out / "spread.png", spreads)
  with files.atomic_path(out / "environment.json") as temporary:
    record = dataclasses.asdict(numerics.probe_environment())
    temporary.write_text(json.dumps(record, indent=2) + os.linesep, encoding="utf-8")
  print(
    f"{terms.shape[0]} terms of {terms.shape[1]} elements; "
    "distances from the exact sum of BF16 terms"
  )
  for row in (SUMMARY[:-2], *(row[:-2] for row in summary)):
    print("  ".join(f"{cell!s:>15}" for cell in row))
  print(f"written: {out}/summary.tsv, orders.tsv, spread.png, environment.json")


if __name__ == "__main__":
  app.run(main)
