"""What both substitution protocols share: the class that is substituted, and its two endpoints."""

import dataclasses

import numpy as np

from configs import prompts as prompt_sets
from experiments.reduction import study as studies
from experiments.reduction.branch_sweep import sweep
from moejax.inference import Event, Sweep
from moejax.inference.branches import branch_execution
from moejax.inference.trajectory import follow, Trajectory
from moejax.report import paper_figures

# Decode inputs: the paper's 8, and more of them only where 8 tell no class from native.
NUM_INPUTS = (8, 16, 32, 63)


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
  """A class to substitute, run beside native.

  Attributes:
    prompt: of the configuration.
    event: frozen.
    number: of the class.
    order: int32 [K], its lowest.
    refused: classes that would have been taken but could not be rebuilt.
    vacuous: whether nothing tells its continuation from the native one.
    branch, native: n decode steps, the event first.
  """

  prompt: prompt_sets.Prompt
  event: Event
  number: int
  order: np.ndarray
  refused: int
  vacuous: bool
  branch: Trajectory
  native: Trajectory

  def predictions(self, trajectory: Trajectory) -> list[int]:
    """All n + 1: the token that the event reads, then what each step predicts."""
    return [self.event.token, *trajectory.predictions.tolist()]


def branches(study: studies.Study, rebuilt=None) -> list[Branch]:
  """The substituted class of every prompt (design of the study, section 5).

  Args:
    study: says which prompts; its horizon is the number of inputs.
    rebuilt: function of (native H_P, branch H_B) → whether the difference rebuilds H_B; a class
      for which it does not is refused and the next one is taken.
  """
  return [_branch(study, prompt, rebuilt) for prompt in study.prompts or prompt_sets.DEPTH[:1]]


def _branch(study: studies.Study, prompt, rebuilt) -> Branch:
  model, scheme = study.model, study.scheme
  choices = (study.horizon,) if study.horizon else NUM_INPUTS
  found = sweep(study, prompt, scheme, choices[-1] + 1)
  for steps in choices:
    number, refused, vacuous = _choose(found, steps + 1, rebuilt)
    if not vacuous:
      break
  else:
    steps = choices[0]
  event = found.fork.event
  order = found.fork.orders[number]
  codes = np.array([scheme.code])
  execution = branch_execution(model, event.layer, order[None], codes)
  run = lambda *more: follow(model, event.token, event.before, steps, *more, mode=study.mode)
  return Branch(prompt, event, number, order, refused, vacuous, run(execution), run())


def _choose(found: Sweep, num_tokens: int, rebuilt) -> tuple[int, int, bool]:
  """(class, refused, vacuous): the lowest whose state differs, whose next token agrees and whose
  later tokens, up to `num_tokens`, do not. Where there is none, the lowest that can be moved at
  all, its next token agreeing; class 0 where every branch leaves native at once.
  """
  native = found.fork.event.post_block
  refused, movable = 0, []
  for number, output in enumerate(found.fork.output):
    state, tokens = found.fork.post_block[output], found.tokens[number]
    differs = state.tobytes() != native.tobytes()
    later = (tokens[2:num_tokens] != found.native[2:num_tokens]).any()
    if tokens[1] != found.native[1]:
      continue
    if rebuilt is None or rebuilt(native, state):
      if differs and later:
        return number, refused, False
      movable.append(number)
    elif differs and later:
      refused += 1
  return movable[0] if movable else 0, refused, True


def named(study: studies.Study, branch: Branch) -> dict:
  """The columns that tell which branch."""
  return dict(prompt=branch.prompt.id, scheme=study.scheme.name)


def paper(study: studies.Study, branch: Branch, table: str, *columns: str) -> dict[str, str]:
  """The paper's figures for some columns, beside the prompt that it substituted."""
  like = branch.prompt == prompt_sets.DEPTH[0]
  find = lambda column: paper_figures.beside(table, study.scheme.name, column) if like else ""
  return {f"paper_{column}": find(column) for column in columns}
