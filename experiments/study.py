"""What the scripts of both studies share: flags, the folder they write to, identity of rows."""

import atexit
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from typing import Any

from absl import app, flags
import jax
from tqdm import tqdm

import moejax
from moejax.checkpoints import LoadedModel
from moejax.models import Mode
from moejax.report.files import atomic_path
from moejax.report.record import claim, run_record
from moejax.report.schema import Row, Table

_MODEL = flags.DEFINE_string(
  "model", "dsv4-nano", "A shipped nano model, or a directory in the layout of Hugging Face."
)
_OUT = flags.DEFINE_string("out", None, "Folder for tables and figures; out/STUDY by default.")
_SEED = flags.DEFINE_integer("seed", None, "Of everything drawn, instead of the study's own.")
_CONTRACT = flags.DEFINE_enum(
  "contract", "native", ["native", "eager"], "The family's combine, or transformers' eager one."
)
_RESUME = flags.DEFINE_boolean("resume", False, "Go on in a folder of the same study.")


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
  """A study of one model in one folder.

  Attributes:
    model, mode: what runs.
    out: the folder.
    seed: of what is drawn.
    resume: whether finished rows are kept.
    quiet: no progress bar.
  """

  model: LoadedModel
  mode: Mode
  out: pathlib.Path
  seed: int = 0
  resume: bool = False
  quiet: bool = False

  def settings(self) -> dict[str, Any]:
    """What a kind of study adds to its record; all of it must be the same on resumption."""
    return {}

  def record(self) -> dict[str, Any]:
    """What must be the same when a folder is gone on with."""
    return run_record(self.model, self.mode, seed=self.seed, **self.settings())

  def claim(self) -> None:
    """Writes record.json, or compares with it.

    Raises:
      ValueError: the folder holds another study.
    """
    claim(self.out / "record.json", self.record())

  @functools.cached_property
  def identity(self) -> Row:
    """What every row of the study has."""
    return dict(
      model=self.model.name,
      weights_sha256=self.model.sha256,
      tokenizer_sha256=self.model.tokenizer.sha256,
      contract=self.model.module.contract(self.mode).name,
      seed=self.seed,
    )

  def write(self, table: Table, rows: list[Row], protocol: str) -> None:
    """Writes a table whose rows lack what they all share."""
    table.write(self.out, [dict(protocol=protocol, **self.identity, **row) for row in rows])

  def read(self, table: Table) -> list[Row]:
    """Its rows without what they share; none where the table is not there or not to be kept."""
    if not table.path(self.out).is_file() or not self.resume:
      return []
    names = {"protocol", *self.identity}
    return [
      {name: value for name, value in row.items() if name not in names}
      for row in table.read(self.out)
    ]

  def write_text(self, name: str, text: str) -> None:
    """A whole text file in the folder."""
    with atomic_path(self.out / name) as path:
      path.write_text(text, encoding="utf-8")

  def progress(self, items, what: str):
    """The items, with a progress bar."""
    return tqdm(items, desc=what, disable=self.quiet, file=sys.stderr, dynamic_ncols=True)


def from_flags(name: str, seed: int, model: str | None = None) -> dict[str, Any]:
  """Arguments of a `Study` as the common flags have them, with a study's own defaults.

  A model that is named here instead of by the flag has a folder of its own within --out.
  """
  share_programs()
  out = pathlib.Path(_OUT.value or f"out/{name}")
  return dict(
    model=moejax.load(model or _MODEL.value),
    mode=Mode(contract=_CONTRACT.value),
    out=out / model if model else out,
    seed=seed if _SEED.value is None else _SEED.value,
    resume=_RESUME.value,
  )


def share_programs() -> None:
  """Lets the processes that this one starts use the programs that it compiled."""
  if not jax.config.jax_compilation_cache_dir:
    folder = tempfile.TemporaryDirectory(prefix="moejax-programs-")
    atexit.register(folder.cleanup)
    jax.config.update("jax_compilation_cache_dir", folder.name)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name


def main(run, make) -> None:
  """Runs a script: run(make()) → summary lines; errors of input are one sentence."""

  def start(_):
    try:
      for line in run(make()):
        print(line)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
      name = pathlib.Path(sys.argv[0]).stem
      raise SystemExit(f"{name}: {error}") from None

  app.run(start)
