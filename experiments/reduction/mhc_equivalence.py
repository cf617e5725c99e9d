"""Post-mHC substitution: the difference of two states after one block, added to the native run.

    python -m experiments.reduction.mhc_equivalence --model=dsv4-nano --out=out/reduction

The native run plus H_B - H_P must go on as branch B does, bit for bit; the layers before the fork
are compared with a run without a probe in another process. mhc_equivalence.tsv, _summary.tsv,
mhc_prefork_equivalence.tsv. About a minute for a nano model.
"""

import jax.numpy as jnp
import numpy as np

from experiments.reduction import study as studies
from experiments.reduction import substitution
from experiments.reduction.single_run import run_alone
from moejax.analysis import tokens_sha256
from moejax.inference.trajectory import follow, sha256, Trajectory
from moejax.models import Delta, Execution
from moejax.report import reduction_tables as tables


def run(study: studies.Study) -> list[str]:
  """Writes the tables; returns what to say."""
  summary, rows, before, lines = [], [], [], []
  for branch in substitution.branches(study, rebuilt):
    injected = inject(study, branch)
    mine = checkpoints(study, branch, injected)
    prefork = prefork_rows(study, branch)
    summary.append(summarise(study, branch, injected, mine, prefork))
    rows, before = rows + mine, before + prefork
    lines.append(describe(summary[-1]))
  study.write(tables.MHC, rows, "mhc_equivalence")
  study.write(tables.MHC_PREFORK, before, "mhc_equivalence")
  study.write(tables.MHC_SUMMARY, summary, "mhc_equivalence")
  return lines


def rebuilt(native: np.ndarray, branch: np.ndarray) -> bool:
  """Whether H_P + (H_B - H_P) is H_B in float32, bit for bit."""
  return (native + delta(native, branch)).tobytes() == branch.tobytes()


def delta(native: np.ndarray, branch: np.ndarray) -> np.ndarray:
  """H_B - H_P in float32; -0.0, which changes no value, where they are equal bit for bit."""
  equal = branch.view(np.uint32) == native.view(np.uint32)
  return np.where(equal, np.float32(-0.0), branch - native)


def inject(study: studies.Study, branch: substitution.Branch) -> Trajectory:
  """The native run with the difference added once; H_B is never copied into it."""
  event = branch.event
  value = delta(event.post_block, branch.branch.post_block[0, event.layer])
  change = Delta(
    layer=jnp.int32(event.layer),
    position=jnp.int32(len(event.prompt)),
    value=jnp.asarray(value)[None],
  )
  return follow(
    study.model,
    event.token,
    event.before,
    len(branch.branch.predictions),
    Execution(delta=change),
    mode=study.mode,
  )


def checkpoints(study: studies.Study, branch, injected: Trajectory) -> list[dict]:
  """Rows of mhc_equivalence."""
  rows = []
  steps, layers = branch.branch.post_block.shape[:2]
  for step in range(steps):
    for layer in range(layers):
      a, b = branch.branch.post_block[step, layer], injected.post_block[step, layer]
      rows.append(
        dict(
          **substitution.named(study, branch),
          step=step,
          layer=layer,
          compared=step > 0 or layer >= branch.event.layer,
          post_mhc_equal=a.tobytes() == b.tobytes(),
          linf=float(np.abs(a - b).max()),
          route_equal=bool((branch.branch.ids[step, layer] == injected.ids[step, layer]).all()),
          branch_sha256=sha256(a),
          injected_sha256=sha256(b),
        )
      )
  return rows


def prefork_rows(study: studies.Study, branch) -> list[dict]:
  """Layers before the fork: the branch in this process, the run without a probe in another."""
  length = branch.event.before.length
  alone = run_alone(study, branch.event.prompt, 2, [{}], length=length)[0]["blocks"][0]
  rows = []
  for layer in range(branch.event.layer):
    a, b = branch.branch.post_block[0, layer], alone[layer]
    rows.append(
      dict(
        **substitution.named(study, branch),
        layer=layer,
        values=a.size,
        equal=a.tobytes() == b.tobytes(),
        linf=float(np.abs(a - b).max()),
        branch_sha256=sha256(a),
        native_sha256=sha256(b),
      )
    )
  return rows


def summarise(study: studies.Study, branch, injected: Trajectory, rows, prefork) -> dict:
  """Of mhc_equivalence_summary; the two guards are of the run that was injected into."""
  event = branch.event
  wanted = branch.branch.post_block[0, event.layer]
  change = delta(event.post_block, wanted)
  pre = branch.native.post_block[0, event.layer]
  counted = [row for row in rows if row["compared"]]
  ours, theirs = (branch.predictions(t) for t in (branch.branch, injected))
  return dict(
    **substitution.named(study, branch),
    layer=event.layer,
    position=len(event.prompt),
    branch=branch.number,
    refused=branch.refused,
    vacuous=branch.vacuous,
    values=change.size,
    delta_nonzero=int((change != 0).sum()),
    delta_linf=float(np.abs(change).max()),
    pre_state_equal=pre.tobytes() == event.post_block.tobytes(),
    post_state_equal=injected.post_block[0, event.layer].tobytes() == wanted.tobytes(),
    prefork_equal=sum(row["equal"] for row in prefork),
    prefork_checkpoints=len(prefork),
    post_mhc_equal=sum(row["post_mhc_equal"] for row in counted),
    post_mhc_checkpoints=len(counted),
    routes_equal=sum(row["route_equal"] for row in rows),
    route_checkpoints=len(rows),
    predictions_equal=sum(a == b for a, b in zip(ours, theirs)),
    predictions=len(ours),
    text_equal=study.text(ours) == study.text(theirs),
    endpoint_sha256=sha256(wanted),
    tokens_sha256=tokens_sha256(ours),
    **substitution.paper(
      study, branch, "mhc_equivalence_summary", "post_mhc_equal", "routes_equal"
    ),
  )


def describe(row: dict) -> str:
  """One line of a summary row."""
  control = "CONTROL VACUOUS: " if row["vacuous"] else ""
  return (
    f"{control}post-mHC substitution, {row['prompt']}, class {row['branch']}: "
    f"{row['post_mhc_equal']} of {row['post_mhc_checkpoints']} states, {row['routes_equal']} of "
    f"{row['route_checkpoints']} routes, {row['predictions_equal']} of {row['predictions']} "
    f"predictions equal; before the fork {row['prefork_equal']} of {row['prefork_checkpoints']}"
  )


if __name__ == "__main__":
  studies.main(run)
