"""Does it reach an answer? Four-choice questions, the losses of their choices, and accuracy.

    python -m experiments.route.task_level --model=olmoe-nano --out=out/route

The answer is the choice with the smallest loss per token. The project's own questions, or a file in
ARC's format with --questions. Nano models answer by chance; the losses are what is compared.
task_level.tsv. Half a minute for a nano model.
"""

import numpy as np

from experiments.route import study as studies
from experiments.route.measure import estimate, RESAMPLES
from moejax import data
from moejax.analysis.attribution import signed_flip_tax
from moejax.analysis.bootstrap import cluster_bootstrap, mean, ratio_of_sums
from moejax.inference import Condition, pad, run_routed
from moejax.report import route_tables as tables

TABLES = (tables.TASK_LEVEL,)
MAX_QUESTIONS = 500


def run(study: studies.Study) -> list[str]:
  """Writes the table; returns what to say."""
  questions = data.read_questions(study.questions) if study.questions else data.questions()
  questions = questions[:MAX_QUESTIONS]
  tokens, scored = encode(study, questions)
  nll, flipped = three_runs(study, tokens)
  right = np.array([question.answer for question in questions])
  correct = {name: answers(questions, nll[name], scored) == right for name in ("cc", "qf")}
  group = np.repeat(np.arange(len(questions)), [len(q.choices) for q in questions])
  by_question = lambda x: np.bincount(group, np.where(scored, x, 0).sum(axis=1))
  count = by_question(np.ones_like(nll["cc"]))
  total, routed = by_question(nll["qf"] - nll["cc"]), by_question(nll["qf"] - nll["qp"])
  bootstrap = lambda *args: cluster_bootstrap(*args, seed=study.seed, resamples=RESAMPLES)
  excess = bootstrap(ratio_of_sums, total, count)
  tax = signed_flip_tax(nll["qf"] - nll["qp"], flipped & scored)
  drop = bootstrap(mean, correct["cc"].astype(float) - correct["qf"])
  row = dict(
    sequences=len(questions),
    tokens=int(scored.sum()),
    data="moejax questions" if study.questions is None else study.questions.rpartition("/")[2],
    questions=len(questions),
    choices=len(tokens),
    accuracy_clean=float(correct["cc"].mean()),
    accuracy_disturbed=float(correct["qf"].mean()),
    **estimate("accuracy_drop", drop),
    **estimate("excess_total", excess),
    **estimate("route_forward", bootstrap(ratio_of_sums, routed, count)),
    rmf=float(routed.sum() / total.sum()) if excess.low > 0 else None,
    interpretable=excess.low > 0,
    harmful=tax.harmful,
    beneficial=tax.beneficial,
    cancellation=tax.cancellation,
    paper=study.paper("task_level", "arc_easy", "cancellation"),
  )
  study.write(tables.TASK_LEVEL, [row], "task_level")
  return [
    f"task level: accuracy {row['accuracy_clean']:.3f} and {row['accuracy_disturbed']:.3f}, excess "
    f"{excess} nats; flips cancel to "
    + ("nothing" if tax.cancellation is None else f"{tax.cancellation:.2f}")
  ]


def encode(study: studies.Study, questions) -> tuple[np.ndarray, np.ndarray]:
  """int32 [choices, T], and bool [choices, T - 1]: the losses that belong to a choice."""
  texts, starts = [], []
  for question in questions:
    stem = study.model.tokenizer.encode(f"Question: {question.question}\nAnswer:")
    for choice in question.choices:
      texts.append([*stem, *study.model.tokenizer.encode(f" {choice}")])
      starts.append(len(stem))
  tokens = pad(texts, 16)
  position = np.arange(1, tokens.shape[1])[None]
  lengths = np.array([len(text) for text in texts])[:, None]
  return tokens, (position >= np.array(starts)[:, None]) & (position < lengths)


def three_runs(study: studies.Study, tokens: np.ndarray) -> tuple[dict, np.ndarray]:
  """Losses float64 [choices, T - 1] of CC, QF and QP, and bool: where QF's experts are others.

  A batch row is a choice: routes are those of its own tokens, whatever stands beside it. Choices of
  like length run together, as a few are many times as long as most; behind a choice all is 0.
  """
  shape = len(tokens), tokens.shape[1] - 1
  nll, flipped = {name: np.zeros(shape) for name in ("cc", "qf", "qp")}, np.zeros(shape, bool)
  lengths = (tokens >= 0).sum(axis=1)
  widths = np.minimum(np.maximum(2 ** np.ceil(np.log2(lengths)), 64), tokens.shape[1]).astype(int)
  for width in np.unique(widths):
    here = np.flatnonzero(widths == width)
    part = tokens[here, :width]
    run = lambda *args: run_routed(study.model, part, *args, prefill=1)
    disturbed = study.disturbance.condition(study.model, study.mode, *part.shape)
    cc = run(Condition(study.mode))
    qf, qp = run(disturbed), run(disturbed, cc.pins())
    for name, found in (("cc", cc), ("qf", qf), ("qp", qp)):
      nll[name][here, : width - 1] = found.nll
    flipped[here, : width - 1] = cc.flips(qf)[study.routers].any(axis=0)
  return nll, flipped


def answers(questions, nll: np.ndarray, scored: np.ndarray) -> np.ndarray:
  """The choice of each question with the smallest loss per token."""
  each = np.where(scored, nll, 0).sum(axis=1) / scored.sum(axis=1)
  ends = np.cumsum([len(question.choices) for question in questions])
  return np.array([part.argmin() for part in np.split(each, ends[:-1])])


if __name__ == "__main__":
  studies.main(run)
