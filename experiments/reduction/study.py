"""What every script of the reduction study shares: flags, the folder it writes to, its rows."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from absl import flags
import jax

from configs import prompts as prompt_sets
from experiments import study as base
from moejax import combine, inference
from moejax.combine.schedules import GENERATOR
from moejax.inference.branches import check_layer

SEED = 20260722  # section 2.4.5 of the paper
DRAW_SEED = 20260723  # section 2.4.4
# Positions after a prompt that states are made for at least: protocols share their programs.
ROOM = 64

_PROMPTS = flags.DEFINE_list("prompts", None, "Ids of configs/prompts.py, for all protocols.")
_FORK_LAYER = flags.DEFINE_integer("fork_layer", 5, "Layer of single forks.")
_SCHEME = flags.DEFINE_enum(
  "scheme", "B", ["P32", "C", "A", "B"], "Of branches in protocols with one scheme."
)
_HORIZON = flags.DEFINE_integer("horizon", None, "Emitted tokens, instead of the protocol's.")


@dataclasses.dataclass(frozen=True, eq=False)
class Study(base.Study):
  """A study of one model in one folder.

  Attributes:
    fork_layer: of single forks.
    scheme: of branches where a protocol has one.
    horizon: emitted tokens; None is the protocol's own.
    prompts: those of all protocols; None is the protocol's own set.
  """

  seed: int = SEED
  fork_layer: int = 5
  scheme: combine.Contract = combine.B
  horizon: int | None = None
  prompts: tuple[prompt_sets.Prompt, ...] | None = None

  def __post_init__(self):
    check_layer(self.model, self.fork_layer)
    if self.model.tokenizer is None:
      raise ValueError(f"{self.model.name} has no tokenizer.json; the prompts are text.")

  def settings(self) -> dict[str, Any]:
    return dict(
      fork_layer=self.fork_layer,
      scheme=self.scheme.name,
      horizon=self.horizon,
      prompts=[p.id for p in self.prompts] if self.prompts else None,
      generator=GENERATOR,
    )

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


def from_flags() -> Study:
  """The study that the flags describe, its folder claimed."""
  study = Study(
    **base.from_flags("reduction", SEED),
    fork_layer=_FORK_LAYER.value,
    scheme=combine.named(_SCHEME.value),
    horizon=_HORIZON.value,
    prompts=find_prompts(_PROMPTS.value) if _PROMPTS.value else None,
  )
  study.claim()
  return study


def main(run) -> None:
  """Runs a script: run(study) → summary lines."""
  base.main(run, from_flags)
