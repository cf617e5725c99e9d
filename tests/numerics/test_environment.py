"""The probe measures what the code relies on."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np

from moejax.numerics import environment, probe_environment


def test_record_is_whole_and_serialises():
  record = probe_environment()
  assert json.loads(json.dumps(dataclasses.asdict(record)))["versions"]["jax"]
  assert record.rounding == "nearest-even"
  assert not record.host_flushes
  assert record.kernels_flush is False  # whatever XLA set
  assert not record.excess_precision
  assert record.threads >= 1 and record.cpus >= 1


def test_probe_sees_flags_that_change_arithmetic():
  code = (
    "from moejax.numerics import probe_environment as p; e = p();"
    "print(e.contracts_products, e.xla_flags)"
  )
  run = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert run.stdout.split() == ["False", "--xla_cpu_max_isa=SSE4_2"]


def test_rounding_probe_tells_directions_apart(monkeypatch):
  class Upward(np.float32):
    def __add__(self, other):
      exact = float(self) + float(other)
      rounded = np.float32(exact)
      return Upward(
        rounded if float(rounded) >= exact else np.nextafter(rounded, np.float32(np.inf))
      )

    def __neg__(self):
      return Upward(-float(self))

    def __sub__(self, other):
      return self + Upward(-float(other))

  monkeypatch.setattr(environment.np, "float32", Upward)
  assert environment._rounding() == "upward"
