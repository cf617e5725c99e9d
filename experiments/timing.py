"""Contestants timed side by side, in random order, round after round."""

import random
import time

import jax
import numpy as np

COLUMNS = (
  "part",
  "case",
  "contestant",
  "median_ms",
  "rate",
  "rate_unit",
  "ratio",
  "against",
  "rounds",
)


def compare(contestants, seconds):
  """Times each of a dict of functions in random order; seconds per call: {name: [round]}."""
  for run in contestants.values():
    jax.block_until_ready(run())
    jax.block_until_ready(run())
  times = {name: [] for name in contestants}
  end = time.perf_counter() + seconds
  while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
    for name in random.sample(list(contestants), len(contestants)):
      start = time.perf_counter()
      jax.block_until_ready(contestants[name]())
      times[name].append(time.perf_counter() - start)
  return times


def rows_of(part, case, times, against, work, unit):
  """One row per contestant; ratio = time of `against` over its own, within rounds."""
  base = np.array(times[against])
  for name, measured in times.items():
    measured = np.array(measured)
    median = np.median(measured)
    yield (
      part,
      case,
      name,
      f"{1e3 * median:.4g}",
      f"{work / median / 1e9:.4g}",
      unit,
      f"{np.median(base / measured):.3g}",
      against,
      str(len(measured)),
    )
