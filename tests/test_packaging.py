"""What a wheel holds, with and without a compiler."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def build_wheel(folder, **environment):
  """Builds in isolation, as a user's pip would; returns the wheel's member names."""
  subprocess.run(
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)],
    env={**os.environ, **environment},
    check=True,
  )
  (wheel,) = folder.glob("*.whl")
  return wheel.name, zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
def test_wheel_holds_the_two_packages_and_nothing_else(tmp_path):
  name, members = build_wheel(tmp_path)
  assert name.startswith("moejax-") and "-py3-none-" in name
  tops = {member.split("/")[0] for member in members}
  assert {top for top in tops if not top.endswith(".dist-info")} == {"moejax", "moejax_kernels"}
  assert "moejax_kernels/libmoejax_kernels.so" in members
  assert "moejax_kernels/__init__.py" in members
  assert "moejax/data/passages/held_out.jsonl" in members
  for name in ("dsv4-nano", "olmoe-nano"):
    assert f"moejax/nano/{name}/model.safetensors" in members
  assert "moejax/report/paper/reduction.tsv" in members


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure(tmp_path):
  # Nothing named as compiler, nothing on the path but Python itself.
  nowhere = str(tmp_path / "no-compiler")
  name, members = build_wheel(tmp_path, CXX=nowhere, CC=nowhere)
  assert name.startswith("moejax-")
  assert not any(member.startswith("moejax_kernels/") for member in members)
  assert "moejax/numerics/library.py" in members
