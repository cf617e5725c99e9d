"""What every script of the reduction study shares: flags, the folder it writes to, its rows."""

import atexit
from collections.abc import Sequence
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

from configs import prompts as prompt_sets
import moejax
from moejax import combine, inference
from moejax.checkpoints import LoadedModel
from moejax.combine.schedules import GENERATOR
from moejax.inference.branches import check_layer
from moejax.models import Mode
from moejax.report import reduction_tables
from moejax.report.record import claim, run_record
from moejax.report.schema import Row, Table

SEED = 20260722  # section 2.4.5 of the paper
DRAW_SEED = 20260723  # section 2.4.4
# Positions after a prompt that states are made for at least: protocols share their programs.
ROOM = 64

_MODEL = flags.DEFINE_string(
  "model", "dsv4-nano", "A shipped nano model, or a directory in the layout of Hugging Face."
)
_OUT = flags.DEFINE_string("out", "out/reduction", "Folder for tables and figures.")
_SEED = flags.DEFINE_integer("seed", SEED, "Of schedules and samples of orders.")
_PROMPTS = flags.DEFINE_list("prompts", None, "Ids of configs/prompts.py, for all protocols.")
_FORK_LAYER = flags.DEFINE_integer("fork_layer", 5, "Layer of single forks.")
_SCHEME = flags.DEFINE_enum(
  "scheme", "B", ["P32", "C", "A", "B"], "Of branches in protocols with one scheme."
)
_HORIZON = flags.DEFINE_integer("horizon", None, "Emitted tokens, instead of the protocol's.")
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
    seed: of schedules and samples.
    fork_layer: of single forks.
    scheme: of branches where a protocol has one.
    horizon: emitted tokens; None is the protocol's own.
    prompts: those of all protocols; None is the protocol's own set.
    resume: whether finished rows are kept.
    quiet: no progress bar.
  """

  model: LoadedModel
  mode: Mode
  out: pathlib.Path
  seed: int = SEED
  fork_layer: int = 5
  scheme: combine.Contract = combine.B
  horizon: int | None = None
  prompts: tuple[prompt_sets.Prompt, ...] | None = None
  resume: bool = False
  quiet: bool = False

  def __post_init__(self):
    check_layer(self.model, self.fork_layer)
    if self.model.tokenizer is None:
      raise ValueError(f"{self.model.name} has no tokenizer.json; the prompts are text.")

  def record(self) -> dict[str, Any]:
    """What must be the same when a folder is gone on with."""
    return run_record(
      self.model,
      self.mode,
      seed=self.seed,
      fork_layer=self.fork_layer,
      scheme=self.scheme.name,
      horizon=self.horizon,
      prompts=[p.id for p in self.prompts] if self.prompts else None,
      generator=GENERATOR,
    )

  def claim(self) -> None:
    """Writes record.json, or compares with it.

    Raises:
      ValueError: the folder holds another study.
    """
    claim(self.out / "record.json", self.record())

  def encode(self, prompt: prompt_sets.Prompt) -> list[int]:
    """Its token ids."""
    return self.model.tokenizer.encode(prompt.text)

  def freeze(self, prompt: prompt_sets.Prompt, num_tokens: int = 0) -> inference.Event:
    """The event of a prompt, with room for so many emitted tokens."""
    ids = self.encode(prompt)
    length = len(ids) + max(num_tokens, ROOM)
    return inference.freeze(self.model, ids, self.fork_layer, length, mode=self.mode)

  def text(self, tokens) -> str:
    """Of whole sequences only."""
    return self.model.tokenizer.decode([int(token) for token in tokens])

  def key(self, *numbers: int) -> jax.Array:
    """For draws: of the seed and more numbers."""
    key = jax.random.key(self.seed, impl="threefry2x32")
    for number in numbers:
      key = jax.random.fold_in(key, number)
    return key

  @functools.cached_property
  def identity(self) -> Row:
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
    names = set(reduction_tables.IDENTITY)
    return [
      {name: value for name, value in row.items() if name not in names}
      for row in table.read(self.out)
    ]

  def progress(self, items, what: str):
    """The items, with a progress bar."""
    return tqdm(items, desc=what, disable=self.quiet, file=sys.stderr, dynamic_ncols=True)


def horizons(study: Study, usual: Sequence[int]) -> list[int]:
  """The usual horizons up to the last one, which --horizon may set."""
  last = study.horizon or usual[-1]
  return [h for h in usual if h < last] + [last]


def ids(tokens) -> str:
  """Token ids, or an order, as a cell."""
  return ",".join(str(int(token)) for token in tokens)


def parse_ids(cell: str) -> list[int]:
  """The inverse of `ids`."""
  return [int(token) for token in cell.split(",")]


def find_prompts(names: list[str]) -> tuple[prompt_sets.Prompt, ...]:
  """Prompts by id.

  Raises:
    ValueError: an unknown id.
  """
  known = {prompt.id: prompt for prompt in prompt_sets.BREADTH}
  for name in names:
    if name not in known:
      raise ValueError(f"unknown prompt id {name!r}; the ids are those of configs/prompts.py.")
  return tuple(known[name] for name in names)


def share_programs() -> None:
  """Lets the processes that this one starts use the programs that it compiled."""
  if not jax.config.jax_compilation_cache_dir:
    folder = tempfile.TemporaryDirectory(prefix="moejax-programs-")
    atexit.register(folder.cleanup)
    jax.config.update("jax_compilation_cache_dir", folder.name)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name


def from_flags() -> Study:
  """The study that the flags describe, its folder claimed."""
  share_programs()
  study = Study(
    model=moejax.load(_MODEL.value),
    mode=Mode(contract=_CONTRACT.value),
    out=pathlib.Path(_OUT.value),
    seed=_SEED.value,
    fork_layer=_FORK_LAYER.value,
    scheme=combine.named(_SCHEME.value),
    horizon=_HORIZON.value,
    prompts=find_prompts(_PROMPTS.value) if _PROMPTS.value else None,
    resume=_RESUME.value,
  )
  study.claim()
  return study


def main(run) -> None:
  """Runs a script: run(study) → summary lines; errors of input are one sentence."""

  def start(_):
    try:
      for line in run(from_flags()):
        print(line)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
      name = pathlib.Path(sys.argv[0]).stem
      raise SystemExit(f"{name}: {error}") from None

  app.run(start)
