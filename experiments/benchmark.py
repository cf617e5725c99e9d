"""Speed, as ratios measured side by side in one run.

    python -m experiments.benchmark --parts=orders,dot,grouped,models --out=out/benchmark.tsv

About ten minutes on 2 cores. Every part times its contestants in random order, round after round,
and reports medians and the median of the ratios within rounds, so that a machine whose speed drifts
does not favour one of them. PyTorch and a C compiler take part where they are installed.

    orders   all 720 orders of six terms at H = 4096, per contract, against the time XLA needs to
             fill the same bytes, NumPy and a plain C loop
    dot      the canonical dot against XLA's and PyTorch's float32 and bfloat16 dots
    grouped  the ragged expert product against jax.lax.ragged_dot
    models   prefill and decode of 12-layer models: canonical, fast, transformers
    compile  seconds to compile one program of each family
    loading  peak memory of loading a 2 GB checkpoint
    sweep    360 branches of dsv4-nano, 64 tokens each, against transformers; five minutes more
    route    the four runs of a 4-bit KV cache against transformers with hooks; two minutes more,
             and run alone, where PyTorch's threads may wait as they like
"""

import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from experiments import model_speed, route_speed, sweep_speed, timing
from moejax import combine, numerics
from moejax.combine import enumeration, reduce
from moejax.numerics import dots_xla
from moejax.report import tables

_PARTS = flags.DEFINE_list("parts", ["orders", "dot", "grouped", "models"], "Parts to run.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Time for each comparison.", lower_bound=0.0)
_ROUTE_MODEL = flags.DEFINE_string(
  "route_model", "olmoe-nano", "Of the part route: a shipped model or a directory; not DeepSeek's."
)
_OUT = flags.DEFINE_string("out", None, "TSV to write; none: print only.")

_HIDDEN = 4096
_SHAPES = ((256, 512), (1024, 1024), (2048, 1024), (4096, 2048))
_ROWS = (1, 6, 64, 360, 720)
_EXPERTS = ((32, 1024, 512), (64, 1024, 256))
_TOKENS = (1, 8, 64)


def orders_part():
  """The kernels against the write limit, NumPy and plain C."""
  terms = np.random.default_rng(0).standard_normal((6, _HIDDEN)).astype(np.float32)
  device_terms, orders = jnp.asarray(terms), combine.all_orders(6)
  device_orders = jnp.asarray(orders)
  fill = jax.jit(lambda value: jnp.broadcast_to(value, (len(orders), _HIDDEN)))
  naive = jax.jit(jax.vmap(reduce.fold_xla, in_axes=(None, 0, None)))
  plain_c = compile_naive_orders()
  for contract in (combine.P32, combine.C, combine.A, combine.B):
    code, reference = jnp.int32(contract.code), device_terms[0]
    fingerprints = functools.partial(combine.all_orders_fingerprints, contract=contract)
    every_sum = jax.jit(lambda terms: combine.combine_all_orders(terms, contract)[1])
    prints = jax.jit(lambda terms: fingerprints(terms)[1])
    prints_and_distances = jax.jit(lambda terms, r: fingerprints(terms, reference=r)[1:])
    contestants = {
      "XLA fill of the same bytes": lambda: fill(jnp.float32(1)),
      "all orders": lambda: every_sum(device_terms),
      "fingerprints": lambda: prints(device_terms),
      "fingerprints and distances": lambda: prints_and_distances(device_terms, reference),
      "XLA form, shared prefixes": lambda: enumeration.all_orders_xla(
        device_terms, enumeration.StaticOrders(orders), contract
      ),
      "XLA form, vmap of fori_loop": lambda: naive(device_terms, device_orders, code),
      "NumPy": lambda: numpy_orders(terms, orders, contract),
    }
    if plain_c:
      contestants["plain C loop, one core"] = lambda: plain_c(terms, orders, contract.code)
    require_same_bits(contestants)
    times = timing.compare(contestants, _SECONDS.value)
    written = 4 * len(orders) * _HIDDEN
    yield from timing.rows_of(
      "orders", contract.name, times, "XLA fill of the same bytes", written, "GB/s"
    )


def require_same_bits(contestants):
  """A race between different sums would say nothing."""
  sums = {
    name: np.asarray(run()).view(np.uint32)
    for name, run in contestants.items()
    if not name.startswith(("XLA fill", "fingerprints"))
  }
  for name, words in sums.items():
    if (words != sums["all orders"]).any():
      raise ValueError(f"{name}: not the bits of the custom call.")


def numpy_orders(terms, orders, contract):
  """Every order in NumPy with ml_dtypes' casts."""
  cast = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)
  operands = cast(terms) if contract.operand == "bfloat16" else terms
  out = np.empty((len(orders), terms.shape[1]), np.float32)
  for row, order in enumerate(orders):
    total = np.zeros(terms.shape[1], np.float32)
    for term in order:
      total = total + operands[term]
      if contract.accumulator == "bfloat16":
        total = cast(total)
    out[row] = total
  return out


def compile_naive_orders():
  """naive_orders.c as a function of (terms, orders, code), or None without a C compiler."""
  compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
  if compiler is None:
    return None
  source = pathlib.Path(__file__).with_name("naive_orders.c")
  with tempfile.TemporaryDirectory() as folder:
    library = f"{folder}/naive_orders.so"
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", library]
    subprocess.run(command, check=True)
    call = ctypes.CDLL(library).naive_orders
  out = np.empty((720, _HIDDEN), np.float32)

  def run(terms, orders, code):
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)
    num_orders, num_terms = (ctypes.c_long(n) for n in orders.shape)
    call(
      pointer(terms),
      pointer(orders),
      num_orders,
      num_terms,
      ctypes.c_long(_HIDDEN),
      code,
      pointer(out),
    )
    return out

  return run


def dot_part():
  """The canonical dot against XLA and PyTorch."""
  rng = np.random.default_rng(0)
  f32_dot = jax.jit(lax.dot)
  bf16_dot = jax.jit(lambda a, w: lax.dot(a, w, preferred_element_type=jnp.float32))
  canonical = jax.jit(numerics.dot)
  blocked = jax.jit(lambda a, w: numerics.dot(a, w, blocked=True))
  xla_form = jax.jit(dots_xla.dot, static_argnums=2)
  for k, n in tqdm(_SHAPES, desc="dot"):
    w_host = (rng.standard_normal((k, n)) / np.sqrt(k)).astype(ml_dtypes.bfloat16)
    w, w_f32 = jnp.asarray(w_host), jnp.asarray(w_host.astype(np.float32))
    for m in _ROWS:
      a_host = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
      a, a_f32 = jnp.asarray(a_host), jnp.asarray(a_host.astype(np.float32))
      contestants = {
        "XLA float32": lambda: f32_dot(a_f32, w_f32),
        "XLA bfloat16": lambda: bf16_dot(a, w),
        "canonical": lambda: canonical(a, w),
        "canonical, blocked": lambda: blocked(a, w),
        "canonical, XLA form": lambda: xla_form(a, w, False),
        **torch_dots(a_host, w_host),
      }
      times = timing.compare(contestants, _SECONDS.value)
      yield from timing.rows_of(
        "dot", f"{m}x{k}x{n}", times, "XLA float32", 2 * m * k * n, "GFLOP/s"
      )


def torch_dots(a, w):
  """PyTorch's contestants, none where it is not installed."""
  try:
    import torch
  except ImportError:
    return {}
  a, w = (torch.from_numpy(x.astype(np.float32)) for x in (a, w))
  a_bf16, w_bf16 = a.bfloat16(), w.bfloat16()
  return {
    "PyTorch float32": lambda: (a @ w).numpy(),
    "PyTorch bfloat16": lambda: (a_bf16 @ w_bf16).view(torch.int16).numpy(),
  }


def grouped_part():
  """The ragged expert product, top 6, against ragged_dot over rows sorted by expert."""
  rng = np.random.default_rng(0)

  @jax.jit
  def ragged(x, w, ids):
    flat = ids.reshape(-1)
    by_expert = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=w.shape[0]).astype(jnp.int32)
    rows = x[by_expert // ids.shape[1]]
    y = lax.ragged_dot(rows, w, sizes, preferred_element_type=jnp.float32)
    return jnp.zeros_like(y).at[by_expert].set(y)

  grouped = jax.jit(numerics.grouped_dot)
  xla_form = jax.jit(dots_xla.grouped_dot)
  for num_experts, k, n in tqdm(_EXPERTS, desc="grouped"):
    w = jnp.asarray((rng.standard_normal((num_experts, k, n)) / 32).astype(ml_dtypes.bfloat16))
    for num_tokens in _TOKENS:
      x = jnp.asarray(rng.standard_normal((num_tokens, k)).astype(ml_dtypes.bfloat16))
      ids = np.stack([rng.permutation(num_experts)[:6] for _ in range(num_tokens)]).astype(np.int32)
      ids = jnp.asarray(ids)
      contestants = {
        "ragged_dot bfloat16": lambda: ragged(x, w, ids),
        "grouped_dot": lambda: grouped(x, w, ids),
        "grouped_dot, XLA form": lambda: xla_form(x[:, None], w, ids),
      }
      times = timing.compare(contestants, _SECONDS.value)
      work = 2 * num_tokens * 6 * k * n
      case = f"{num_tokens} tokens, {num_experts} experts {k}x{n}"
      yield from timing.rows_of("grouped", case, times, "ragged_dot bfloat16", work, "GFLOP/s")


_RUN = {
  "orders": orders_part,
  "dot": dot_part,
  "grouped": grouped_part,
  "models": lambda: model_speed.models_part(_SECONDS.value),
  "compile": lambda: model_speed.compile_part(_SECONDS.value),
  "loading": lambda: model_speed.loading_part(_SECONDS.value),
  "sweep": sweep_speed.sweep_part,
  "route": lambda: route_speed.route_part(_ROUTE_MODEL.value),
}


def main(_):
  unknown = set(_PARTS.value) - set(_RUN)
  if unknown:
    raise app.UsageError(f"unknown part {', '.join(sorted(unknown))}: expected {', '.join(_RUN)}.")
  if _PARTS.value != ["route"]:
    # PyTorch's threads spin between calls and would take the cores from whoever comes next. That
    # does not matter to the part route, whose calls are long, and is what makes its steps fast.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
  library = numerics.native()
  kernels = library.isa if library else "plain XLA"
  print(f"kernels: {kernels}; environment: {numerics.probe_environment()}")
  rows = []
  for part in _PARTS.value:
    for row in _RUN[part]():
      rows.append(row)
      print("  ".join(f"{cell:>12}" for cell in row), flush=True)
  if _OUT.value:
    tables.write_tsv(_OUT.value, timing.COLUMNS, rows)


if __name__ == "__main__":
  app.run(main)
