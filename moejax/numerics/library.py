"""Loads the XLA CPU custom calls of `kernels/`, or says once why plain XLA is used instead.

Environment: `MOEJAX_NATIVE=0` asks for plain XLA (same bits, slower),
`MOEJAX_ISA=generic|avx2|avx512` for a lower instruction set than the processor's best (same bits).
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import warnings

import jax

_TARGETS = {
  "moejax_dot": "MoejaxDot",
  "moejax_dot_f32": "MoejaxDotF32",
  "moejax_batched_dot": "MoejaxBatchedDot",
  "moejax_grouped_dot": "MoejaxGroupedDot",
  "moejax_combine": "MoejaxCombine",
  "moejax_all_orders": "MoejaxAllOrders",
  "moejax_fingerprints": "MoejaxFingerprints",
  "moejax_control_word": "MoejaxControlWord",
  "moejax_materialize": "MoejaxMaterialize",
}


class StaleKernelsError(RuntimeError):
  """The installed kernel library was built from other sources than the ones at hand."""


@dataclasses.dataclass(frozen=True)
class KernelLibrary:
  """The loaded custom calls: where they are, which sources built them, what they can run."""

  path: str
  source_hash: str
  isas: tuple[str, ...]  # instruction sets of this processor, slowest first
  _handle: ctypes.CDLL = dataclasses.field(repr=False, compare=False)

  @property
  def isa(self) -> str:
    """The instruction set in use."""
    return self._handle.moejax_isa().decode()

  def force_isa(self, name: str) -> None:
    """Switches the whole process to one of `isas`; bits do not change, speed does."""
    if name not in self.isas:
      raise ValueError(f"instruction set {name!r} is not one of {', '.join(self.isas)}.")
    self._handle.moejax_force_isa(name.encode())


def native() -> KernelLibrary | None:
  """The kernel library in use, or None where every function runs in plain XLA."""
  if os.environ.get("MOEJAX_NATIVE", "1") == "0" or jax.default_backend() != "cpu":
    return None
  return _load()


@functools.cache
def _load() -> KernelLibrary | None:
  path = _find()
  if path is None:
    return _fall_back("the package moejax_kernels is not installed (was there a C++ compiler?)")
  try:
    handle = ctypes.CDLL(str(path))
  except OSError as error:
    return _fall_back(f"{path} does not load: {error}")
  for name in ("moejax_source_hash", "moejax_isa", "moejax_isas"):
    getattr(handle, name).restype = ctypes.c_char_p
  source_hash = handle.moejax_source_hash().decode()
  _refuse_stale(path, source_hash)
  built, installed = handle.moejax_ffi_api_minor(), _installed_ffi_api_minor()
  if installed < built:
    # Registering such a library makes JAX lose its CPU backend at first use, far from here.
    return _fall_back(f"{path} needs XLA FFI API 0.{built}, the installed jaxlib has 0.{installed}")
  for target, symbol in _TARGETS.items():
    capsule = jax.ffi.pycapsule(getattr(handle, symbol))
    jax.ffi.register_ffi_target(target, capsule, platform="cpu")
  library = KernelLibrary(
    str(path), source_hash, tuple(handle.moejax_isas().decode().split(",")), handle
  )
  if isa := os.environ.get("MOEJAX_ISA"):
    library.force_isa(isa)
  return library


def _fall_back(reason: str) -> None:
  warnings.warn(
    f"moejax runs in plain XLA, with the same bits and slower: {reason}.",
    RuntimeWarning,
    stacklevel=4,
  )


def _find() -> pathlib.Path | None:
  spec = importlib.util.find_spec("moejax_kernels")
  if spec is None or spec.origin is None:
    return None
  return next(pathlib.Path(spec.origin).parent.glob("libmoejax_kernels.*"), None)


def _refuse_stale(path: pathlib.Path, built_from: str) -> None:
  sources = pathlib.Path(__file__).parents[2] / "kernels"
  if (sources / "CMakeLists.txt").exists():
    expected, where = hash_sources(sources), str(sources)
  else:
    expected, where = importlib.import_module("moejax_kernels").SOURCE_HASH, "this installation"
  if built_from != expected:
    raise StaleKernelsError(
      f"{path} was built from kernel sources {built_from[:12]}, but {where} has {expected[:12]}: "
      "run `pip install .` again, or set MOEJAX_NATIVE=0 to use plain XLA."
    )


def hash_sources(folder: pathlib.Path) -> str:
  """SHA-256 over the kernel sources, as kernels/CMakeLists.txt computes it."""
  files = [*folder.glob("*.cc"), *folder.glob("*.h"), folder / "CMakeLists.txt"]
  lines = (
    f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n"
    for file in sorted(files, key=lambda file: file.name)
  )
  return hashlib.sha256("".join(lines).encode()).hexdigest()


def _installed_ffi_api_minor() -> int:
  header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
  return int(re.search(r"#define XLA_FFI_API_MINOR (\d+)", header).group(1))
