"""What every script of the route study shares: flags, text, clean and disturbed runs, its rows."""

import dataclasses
import functools
import pathlib
from typing import Any

from absl import flags
import numpy as np

from experiments import study as base
from experiments.route.measure import contrasts, INTERVAL
from moejax import data, inference
from moejax.data.splits import documents_sha256, split_of
from moejax.inference import Condition, FourRun, KvQuantization, Routed, run_routed
from moejax.inference.routed import ROWS
from moejax.report import paper_figures
from moejax.report.schema import Row, Table

SEED = 20260811  # the paper names none; the day it appeared
PRIMARY = KvQuantization(4)
OWN = "moejax passages"
_PAPER_MODELS = {"qwen2_moe": "qwen15", "qwen3_moe": "qwen3"}  # its names of families

_DATA = flags.DEFINE_list(
  "data", None, "Files .jsonl[.xz|.gz] with `text`; the project's own passages by default."
)
_QUESTIONS = flags.DEFINE_string(
  "questions", None, "Four-choice questions in ARC's format; the project's own by default."
)
_SEQUENCES = flags.DEFINE_integer("num_sequences", 96, "Windows of text.", 1)
_LENGTH = flags.DEFINE_integer("length", 256, "Tokens of a window.", 2)
_PREFILL = flags.DEFINE_integer("prefill", 64, "Of them given.", 1)
_BITS = flags.DEFINE_integer("bits", 4, "Of the simulated KV cache.")
_STRENGTH = flags.DEFINE_float("strength", 1.0, "Of its quantiser.")


@dataclasses.dataclass(frozen=True)
class Text:
  """Where windows come from.

  Attributes:
    documents: of one split, in order.
    split: its name.
    source: as tables have it.
  """

  documents: tuple[data.Document, ...]
  split: str
  source: str

  @functools.cached_property
  def sha256(self) -> str:
    return documents_sha256(self.documents)


def read_text(files: list[str] | None, split: str) -> Text:
  """The passages of a split, or the documents of files that fall into it by hash.

  Raises:
    ValueError, FileNotFoundError: as `data.read_documents`; no document in the split.
  """
  if files is None:
    return Text(tuple(data.passages(split)), split, OWN)
  for name in files:
    if not pathlib.Path(name).is_file():
      raise FileNotFoundError(f"no file {name}: expected .jsonl, .jsonl.xz or .jsonl.gz.")
  documents = [d for name in files for d in data.read_documents(name) if split_of(d) == split]
  if not documents:
    raise ValueError(f"{', '.join(files)}: no document falls into the split {split}.")
  return Text(tuple(documents), split, ",".join(pathlib.Path(name).name for name in files))


@dataclasses.dataclass(frozen=True, eq=False)
class Study(base.Study):
  """A route study of one model in one folder.

  Attributes:
    text: of the calibration split.
    files: where the held-out split is; None is the project's own.
    questions: file of four-choice questions, or None.
    num_sequences, length, prefill: windows, their tokens, and how many of these are given.
    disturbance: the primary one.
  """

  seed: int = SEED
  text: Text | None = None
  files: tuple[str, ...] | None = None
  questions: str | None = None
  num_sequences: int = 96
  length: int = 256
  prefill: int = 64
  disturbance: inference.Disturbance = PRIMARY

  def __post_init__(self):
    if self.model.tokenizer is None:
      raise ValueError(f"{self.model.name} has no tokenizer.json; the sequences are text.")
    if self.num_sequences < 2:
      raise ValueError(f"{self.num_sequences} sequences: intervals need at least two clusters.")
    if self.length <= self.prefill:
      raise ValueError(
        f"sequences of {self.length} tokens leave nothing behind a prefill of {self.prefill}."
      )

  def settings(self) -> dict[str, Any]:
    return dict(
      data=self.text.source,
      data_sha256=self.text.sha256,
      questions=self.questions,
      num_sequences=self.num_sequences,
      length=self.length,
      prefill=self.prefill,
      disturbance=self.disturbance.name,
    )

  @functools.cached_property
  def windows(self) -> data.Windows:
    """Nested: more sequences of a seed contain fewer."""
    return self.draw(self.text)

  def draw(self, text: Text) -> data.Windows:
    """Windows of a split; `length` tokens each."""
    return data.windows(
      text.documents, self.model.tokenizer, self.length, num=self.num_sequences, seed=self.seed
    )

  @property
  def tokens(self) -> np.ndarray:
    """int32 [B, length]."""
    return self.windows.tokens

  @property
  def routers(self) -> list[int]:
    """Layers where a router decides; the last one is the scoring layer."""
    return self.model.config.router_layers

  @functools.cached_property
  def clean(self) -> Routed:
    """CC, with statistics, and log probabilities for divergences."""
    return self.run(Condition(self.mode), statistics=True, keep=True)

  def run(self, condition: Condition, pins=None, **more) -> Routed:
    """A run of the study's sequences."""
    return run_routed(self.model, self.tokens, condition, pins, prefill=self.prefill, **more)

  @functools.cached_property
  def disturbed(self) -> Condition:
    """How the primary disturbance computes."""
    return self.disturbance.condition(self.model, self.mode, *self.tokens.shape)

  @functools.cached_property
  def four(self) -> FourRun:
    """The four runs of the primary disturbance, controlled on every sequence."""
    return self._four(self.disturbance, statistics=True, controls=None)

  @functools.cached_property
  def _kept(self) -> dict[str, tuple[Row, FourRun]]:
    return {}

  def contrasts(self, disturbance: inference.Disturbance) -> tuple[Row, FourRun]:
    """Columns of a disturbance's four runs, and the runs; done once.

    Of disturbances other than the primary one the controls run on one batch, and routes are not
    kept beyond the sets of QF.
    """
    name = disturbance.name
    if name not in self._kept:
      primary = name == self.disturbance.name
      four = self.four if primary else slim(self._four(disturbance, controls=ROWS))
      row = contrasts(four, self.routers, self.seed)
      self._kept[name] = dict(row, disturbance=name), four
    return self._kept[name]

  def paper(self, table: str, row: str, column: str) -> str:
    """The paper's figure for its model of this family under 4-bit KV, or that of its OLMoE."""
    family = _PAPER_MODELS.get(self.model.family, self.model.family)
    for model, prefix in ((family, ""), ("olmoe", "OLMoE ")):
      name = "/".join(filter(None, (model, "kv4", row)))
      if figure := paper_figures.beside(table, name, column, study="route"):
        return figure if family == model else prefix + figure
    return ""

  def _four(self, disturbance, **more) -> FourRun:
    return inference.four_run(
      self.model,
      self.tokens,
      disturbance,
      self.clean,
      mode=self.mode,
      prefill=self.prefill,
      divergence=True,
      **more,
    )

  def write(self, table: Table, rows: list[Row], protocol: str, text: Text | None = None) -> None:
    """Writes a table; what a row does not say is said of the study's own run."""
    text = text or self.text
    common = dict(
      data=text.source,
      data_sha256=text.sha256,
      split=text.split,
      disturbance=self.disturbance.name,
      sequences=self.num_sequences,
      tokens=self.num_sequences * (self.length - self.prefill),
      interval=INTERVAL,
    )
    super().write(table, [common | row for row in rows], protocol)


def slim(four: FourRun) -> FourRun:
  """Without routes that nobody reads again: sets of QF stay."""
  none = np.empty(0)
  drop = lambda run: dataclasses.replace(run, weights=none, slots=none)
  qp, ct = (dataclasses.replace(drop(run), ids=none) for run in (four.qp, four.ct))
  return dataclasses.replace(four, qp=qp, ct=ct, qf=drop(four.qf))


def from_flags(model: str | None = None) -> Study:
  """The study that the flags describe, of a named model instead if there is one; folder claimed."""
  files = _DATA.value
  study = Study(
    **base.from_flags("route", SEED, model),
    text=read_text(files, "calibration"),
    files=tuple(files) if files else None,
    questions=_QUESTIONS.value,
    num_sequences=_SEQUENCES.value,
    length=_LENGTH.value,
    prefill=_PREFILL.value,
    disturbance=KvQuantization(_BITS.value, _STRENGTH.value),
  )
  # Text that does not suffice is refused before the folder is taken.
  study.draw(study.text)
  study.claim()
  return study


def main(run) -> None:
  """Runs a script: run(study) → summary lines."""
  base.main(run, from_flags)
