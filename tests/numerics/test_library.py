"""The kernel library: required where buildable, refused when stale, replaced once and audibly."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.numerics import library as library
from moejax.numerics.library import hash_sources, native, StaleKernelsError

KERNELS = pathlib.Path(__file__).parents[2] / "kernels"


def run_python(code, **environment):
  """Runs code in a fresh interpreter that imports moejax from where this one did."""
  return subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, **environment},
    cwd=KERNELS.parent,
    capture_output=True,
    text=True,
  )


@pytest.mark.skipif(
  not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)
def test_native_is_in_use_where_a_compiler_exists():
  assert native() is not None
  assert native().isa in native().isas
  assert native().isas[0] == "generic"


def test_library_was_built_from_these_sources():
  assert native().source_hash == hash_sources(KERNELS)


def test_hash_covers_every_source(tmp_path):
  shutil.copytree(KERNELS, tmp_path / "kernels")
  expected = hash_sources(tmp_path / "kernels")
  assert expected == hash_sources(KERNELS)
  for source in sorted((tmp_path / "kernels").iterdir()):
    before = source.read_bytes()
    source.write_bytes(before + b"\n")
    assert hash_sources(tmp_path / "kernels") != expected, source.name
    source.write_bytes(before)


def test_stale_library_is_refused_by_name(monkeypatch):
  monkeypatch.setattr(library, "hash_sources", lambda folder: "0" * 64)
  with pytest.raises(StaleKernelsError, match=r"libmoejax_kernels.* was built from kernel sources"):
    library._load.__wrapped__()


def test_source_tree_does_not_shadow_the_installed_package():
  spec = importlib.util.find_spec("moejax_kernels")
  assert KERNELS.parent not in pathlib.Path(spec.origin).parents


def test_missing_library_warns_once_and_keeps_the_bits():
  code = """
import importlib.util, sys, warnings
import jax.numpy as jnp, numpy as np
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == 'moejax_kernels' else find(name, *a)
from moejax import combine, numerics
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter('always')
  assert numerics.native() is None
  a = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4) / 7
  out = numerics.dot(a, a.T)
  combine.combine(jnp.ones((3, 4), jnp.float32), np.arange(3), combine.B)
print(sum('plain XLA' in str(w.message) for w in caught))
print(np.asarray(out).tobytes().hex())
"""
  result = run_python(code)
  assert result.returncode == 0, result.stderr
  warnings, bits = result.stdout.split()
  assert warnings == "1"
  a = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4) / 7
  assert bits == np.asarray(native_dot(a, a.T)).tobytes().hex()


def native_dot(a, w):
  from moejax import numerics

  assert numerics.native() is not None
  return numerics.dot(a, w)


def test_plain_xla_on_request_is_silent():
  result = run_python(
    "import moejax.numerics as n; print(n.native())", MOEJAX_NATIVE="0", PYTHONWARNINGS="error"
  )
  assert result.stdout.strip() == "None", result.stderr


def test_isa_from_the_environment():
  code = "import moejax.numerics as n; print(n.native().isa)"
  assert run_python(code, MOEJAX_ISA="generic").stdout.strip() == "generic"
  refused = run_python(code, MOEJAX_ISA="quantum")
  assert "ValueError: instruction set 'quantum' is not one of generic" in refused.stderr


def test_unknown_isa_is_refused():
  with pytest.raises(ValueError, match="'sse9' is not one of"):
    native().force_isa("sse9")


def test_old_ffi_runtime_falls_back(monkeypatch):
  monkeypatch.setattr(library, "_installed_ffi_api_minor", lambda: -1)
  with pytest.warns(RuntimeWarning, match="needs XLA FFI API"):
    assert library._load.__wrapped__() is None


def test_floating_point_environment_is_ieee_inside_and_restored_after():
  out = jax.ShapeDtypeStruct((4,), jnp.uint32)
  words = np.asarray(jax.jit(lambda: jax.ffi.ffi_call("moejax_control_word", out)())())
  before, inside, after, threads = words.tolist()
  assert before == after
  assert threads >= 1
  if sys.platform == "linux" and os.uname().machine == "x86_64":
    flush, denormals_are_zero, rounding = 0x8000, 0x40, 0x6000
    assert inside & (flush | denormals_are_zero | rounding) == 0
    assert before & (flush | denormals_are_zero)  # so that the scope is needed at all
