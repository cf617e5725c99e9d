"""Persistent-state substitution: the difference of two states at a token boundary, added to native.

    python -m experiments.reduction.kv_equivalence --model=dsv4-nano --out=out/reduction

After the event branch B and native read the same token, unforced. From there native plus S_B - S_P
must go on as the branch does, bit for bit. kv_equivalence.tsv, _layers.tsv, _summary.tsv. Under a
minute for a nano model.
"""

import numpy as np

from experiments.reduction import study as studies
from experiments.reduction import substitution
from moejax.analysis import tokens_sha256
from moejax.inference import difference, num_differing, substitute
from moejax.inference.trajectory import follow, layer_sha256, sha256, Trajectory
from moejax.models import export, PersistentState
from moejax.report import reduction_tables as tables


def run(study: studies.Study) -> list[str]:
  """Writes the tables; returns what to say."""
  summary, rows, layers, lines = [], [], [], []
  for branch in substitution.branches(study):
    native, wanted = branch.native.states[0], branch.branch.states[0]
    rebuilt = {
      kind: substitute(native, difference(wanted, native, kind))
      for kind in ("float64", "float32", "xor")
    }
    used = "float64" if num_differing(rebuilt["float64"], wanted) == 0 else "xor"
    # A native run of its own, with both guards.
    fresh = follow(study.model, branch.event.token, branch.event.before, 1, mode=study.mode)
    change = difference(wanted, native, used)
    injected = follow(
      study.model,
      int(fresh.predictions[0]),
      substitute(fresh.states[0], change, before=native, after=wanted),
      len(branch.native.predictions) - 1,
      mode=study.mode,
    )
    mine = checkpoints(study, branch, injected)
    by_layer = layer_rows(study, branch, rebuilt)
    summary.append(summarise(study, branch, injected, mine, by_layer, used))
    rows, layers = rows + mine, layers + by_layer
    lines.append(describe(summary[-1]))
  study.write(tables.KV, rows, "kv_equivalence")
  study.write(tables.KV_LAYERS, layers, "kv_equivalence")
  study.write(tables.KV_SUMMARY, summary, "kv_equivalence")
  return lines


def checkpoints(study: studies.Study, branch, injected: Trajectory) -> list[dict]:
  """Rows of kv_equivalence: steps after the boundary."""
  rows, wanted = [], branch.branch
  for step in range(1, len(wanted.predictions)):
    for layer in range(wanted.post_block.shape[1]):
      ours, theirs = wanted.state_sha256[step][layer], injected.state_sha256[step - 1][layer]
      a, b = wanted.post_block[step, layer], injected.post_block[step - 1, layer]
      rows.append(
        dict(
          **substitution.named(study, branch),
          step=step,
          layer=layer,
          post_mhc_equal=a.tobytes() == b.tobytes(),
          state_equal=ours == theirs,
          route_equal=bool((wanted.ids[step, layer] == injected.ids[step - 1, layer]).all()),
          branch_sha256=ours,
          injected_sha256=theirs,
        )
      )
  return rows


def layer_rows(study: studies.Study, branch, rebuilt: dict[str, PersistentState]) -> list[dict]:
  """Rows of kv_equivalence_layers."""
  native, wanted = branch.native.states[0], branch.branch.states[0]
  hashes = {kind: layer_sha256(state) for kind, state in rebuilt.items()}
  before, after, exact = layer_sha256(native), layer_sha256(wanted), by_layer(rebuilt["float64"])
  rows = []
  for layer, (a, b) in enumerate(zip(by_layer(native), by_layer(wanted))):
    with np.errstate(invalid="ignore"):
      distance = np.abs(b.astype(np.float64) - a)
    finite = distance[np.isfinite(distance)]
    rows.append(
      dict(
        **substitution.named(study, branch),
        layer=layer,
        values=a.size,
        differing=unlike(a, b),
        linf=float(finite.max(initial=0.0)),
        fp64_equal=hashes["float64"][layer] == after[layer],
        fp64_exceptions=unlike(exact[layer], b),
        fp32_equal=hashes["float32"][layer] == after[layer],
        xor_equal=hashes["xor"][layer] == after[layer],
        native_sha256=before[layer],
        branch_sha256=after[layer],
      )
    )
  return rows


def by_layer(state: PersistentState) -> list[np.ndarray]:
  """The values of each layer's state in canonical order."""
  values: dict[str, list[np.ndarray]] = {}
  for name, value in export(state).items():
    values.setdefault(name.split(".")[1], []).append(value.reshape(-1))
  return [np.concatenate(parts) for parts in values.values()]


def unlike(a: np.ndarray, b: np.ndarray) -> int:
  """How many values differ in their bits."""
  return int((a.view(np.uint32) != b.view(np.uint32)).sum())


def summarise(study: studies.Study, branch, injected: Trajectory, rows, layers, used: str) -> dict:
  """Of kv_equivalence_summary."""
  wanted = branch.branch
  ours = branch.predictions(wanted)
  # Two come before the injection: the native run's own.
  theirs = [*branch.predictions(branch.native)[:2], *injected.predictions.tolist()]
  untouched = [row["differing"] == 0 for row in layers]
  return dict(
    **substitution.named(study, branch),
    layer=branch.event.layer,
    position=len(branch.event.prompt),
    branch=branch.number,
    refused=branch.refused,
    vacuous=branch.vacuous,
    next_token_equal=ours[1] == branch.predictions(branch.native)[1],
    values=sum(row["values"] for row in layers),
    differing=sum(row["differing"] for row in layers),
    delta_linf=max(row["linf"] for row in layers),
    layers_untouched=[*untouched, False].index(False),
    fp64_layers=sum(row["fp64_equal"] for row in layers),
    fp64_exceptions=sum(row["fp64_exceptions"] for row in layers),
    fp32_layers=sum(row["fp32_equal"] for row in layers),
    xor_layers=sum(row["xor_equal"] for row in layers),
    layers=len(layers),
    used={"float64": "fp64", "xor": "xor"}[used],
    post_mhc_equal=sum(row["post_mhc_equal"] for row in rows),
    states_equal=sum(row["state_equal"] for row in rows),
    routes_equal=sum(row["route_equal"] for row in rows),
    checkpoints=len(rows),
    predictions_equal=sum(a == b for a, b in zip(ours, theirs)),
    predictions=len(ours),
    text_equal=study.text(ours) == study.text(theirs),
    endpoint_sha256=sha256(*by_layer(wanted.states[0])),
    tokens_sha256=tokens_sha256(ours),
    **substitution.paper(
      study, branch, "kv_equivalence_summary", "differing", "fp32_layers", "states_equal"
    ),
  )


def describe(row: dict) -> str:
  """One line of a summary row."""
  control = "CONTROL VACUOUS: " if row["vacuous"] else ""
  return (
    f"{control}persistent-state substitution, {row['prompt']}, class {row['branch']}: "
    f"{row['differing']} of {row['values']} values differ; FP64 rebuilds {row['fp64_layers']} of "
    f"{row['layers']} layers, FP32 {row['fp32_layers']}; then {row['post_mhc_equal']}, "
    f"{row['states_equal']}, {row['routes_equal']} of {row['checkpoints']} states after blocks, "
    f"persistent states, routes equal"
  )


if __name__ == "__main__":
  studies.main(run)
