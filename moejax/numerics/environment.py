"""What this process does to floating-point numbers, measured rather than assumed, as a record."""

import dataclasses
import importlib.metadata
import os
import platform

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics.library import native

_PACKAGES = ("moejax", "jax", "jaxlib", "flax", "numpy", "ml-dtypes")


@dataclasses.dataclass(frozen=True)
class Environment:
  """One process's numerics. Booleans come from running the arithmetic, versions from metadata.

  Attributes:
    xla_flushes_results: a subnormal sum of normal numbers is zero in jitted code (FTZ).
    xla_flushes_inputs: a subnormal operand counts as zero in jitted code (DAZ).
    host_flushes: the same for NumPy on the calling thread.
    kernels_flush: the same inside a custom call; None without one.
    rounding: "nearest-even", or what NumPy's additions show instead.
    excess_precision: a BF16 sum inside a jitted expression keeps more than BF16.
    contracts_products: a·b + c inside a jitted function is one fused multiply-add.
    kernels: instruction set of the custom calls, or "plain XLA".
    kernels_hash: SHA-256 of the kernel sources, or None.
    xla_control_word: MXCSR (x86) or FPCR (Arm) as XLA sets it, hexadecimal; None without kernels.
    threads: threads of XLA's CPU pool; None without kernels.
    cpus: processors this process may run on.
    cpu, operating_system, python: as the platform names them.
    backend: JAX's default backend.
    xla_flags: the environment variable.
    versions: of the libraries that touch numbers.
  """

  xla_flushes_results: bool
  xla_flushes_inputs: bool
  host_flushes: bool
  kernels_flush: bool | None
  rounding: str
  excess_precision: bool
  contracts_products: bool
  kernels: str
  kernels_hash: str | None
  xla_control_word: str | None
  threads: int | None
  cpus: int
  cpu: str
  operating_system: str
  python: str
  backend: str
  xla_flags: str
  versions: dict[str, str]


def probe_environment() -> Environment:
  """Measures the process it is called in. Takes a second at first, for compiling."""
  library = native()
  control = _control_words() if library else None
  return Environment(
    xla_flushes_results=_is_zero(jax.jit(lambda a, b: a - b)(*_f32(1.5 * 2.0**-126, 2.0**-126))),
    xla_flushes_inputs=_is_zero(jax.jit(lambda a, b: a * b)(*_f32(2.0**-130, 2.0**20))),
    host_flushes=bool(np.float32(1.5 * 2.0**-126) - np.float32(2.0**-126) == 0),
    kernels_flush=_kernels_flush() if library else None,
    rounding=_rounding(),
    excess_precision=_excess_precision(),
    contracts_products=_contracts(),
    kernels=library.isa if library else "plain XLA",
    kernels_hash=library.source_hash if library else None,
    xla_control_word=f"{control[0]:#x}" if control is not None else None,
    threads=int(control[3]) if control is not None else None,
    cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    cpu=_cpu_model(),
    operating_system=platform.platform(),
    python=platform.python_version(),
    backend=jax.default_backend(),
    xla_flags=os.environ.get("XLA_FLAGS", ""),
    versions={name: _version(name) for name in _PACKAGES},
  )


def _f32(*values):
  return tuple(jnp.float32(value) for value in values)


def _is_zero(x) -> bool:
  return bool(np.asarray(x) == 0)


def _control_words():
  """[4]: the control word as XLA set it, inside a kernel's scope, after it, and pool threads."""
  out = jax.ShapeDtypeStruct((4,), jnp.uint32)
  return np.asarray(jax.jit(lambda: jax.ffi.ffi_call("moejax_control_word", out)())())


def _kernels_flush() -> bool:
  # A custom call that adds: 1.5·2^-126 - 2^-126 as a combine of two terms.
  out = jax.ShapeDtypeStruct((1,), jnp.float32)
  call = jax.ffi.ffi_call("moejax_combine", out)
  terms = jnp.array([[1.5 * 2.0**-126], [-(2.0**-126)]], jnp.float32)
  return _is_zero(jax.jit(call)(terms, jnp.array([0, 1], jnp.int32), jnp.int32(0)))


def _rounding() -> str:
  one, half_ulp = np.float32(1), np.float32(2.0**-24)
  odd = np.float32(1 + 2.0**-23)
  if one + half_ulp == one and odd + half_ulp > odd and -one - half_ulp == -one:
    return "nearest-even"
  up, down = one + half_ulp > one, -one - half_ulp < -one
  return {(True, False): "upward", (False, True): "downward"}.get((up, down), "toward zero")


def _excess_precision() -> bool:
  chain = jax.jit(lambda a, b, c: (a + b) + c)
  a, b, c = (jnp.bfloat16(x) for x in (1.0, 2.0**-8, 2.0**-8))
  return bool(np.asarray(chain(a, b, c)).astype(np.float32) != 1.0)  # each half ulp rounds away


def _contracts() -> bool:
  a = jnp.full(64, 1 + 2.0**-12, jnp.float32)
  c = jnp.full(64, -(1 + 2.0**-11), jnp.float32)
  return bool((np.asarray(jax.jit(lambda a, c: a * a + c)(a, c)) != 0).any())


def _cpu_model() -> str:
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
      return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
  except (OSError, StopIteration):
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
