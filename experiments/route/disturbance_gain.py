"""How a difference of states grows from block to block, and what four other instruments say.

    python -m experiments.route.disturbance_gain --model=olmoe-nano --out=out/route

disturbance_gain.tsv by layer, disturbance_gain_summary.tsv with the products and the share of the
always-on expert. States of the first 16 sequences. Half a minute for a nano model.
"""

import numpy as np

from experiments.route import study as studies
from moejax.analysis.gain import disturbance_gain
from moejax.inference import Condition, score
from moejax.inference.routed import ROWS, whole
from moejax.models import Taps
from moejax.report import route_tables as tables

TABLES = (tables.GAIN, tables.GAIN_SUMMARY)
_PRODUCTS = ("gain_product", "relative_product")
_TAPS = Taps(post_block=True, shared=True, routed=True)


def run(study: studies.Study) -> list[str]:
  """Writes both tables; returns what to say."""
  (clean, share), (disturbed, _) = (
    states(study, condition) for condition in (Condition(study.mode), study.disturbed)
  )
  found = disturbance_gain(clean, disturbed)
  size = dict(sequences=clean.shape[1], tokens=clean.shape[1] * clean.shape[2])
  rows = []
  for step, gain in enumerate(found.gains):
    rows.append(
      dict(
        size,
        layer=step + 1,
        gain=float(gain),
        relative_gain=float(found.relative_gains[step]),
        small_gain_share=float(found.small_gains[step]),
        excluded=int(found.excluded[step]),
        cross_share=float(found.cross_share[step]),
        persistence=float(found.persistence[step + 1]),
      )
    )
  study.write(tables.GAIN, rows, "disturbance_gain")
  products = (study.paper("disturbance_gain_summary", "", name) for name in _PRODUCTS)
  summary = dict(
    size,
    gain_product=float(found.product),
    relative_product=float(found.relative_product),
    first_relative_gain=float(found.relative_gains[0]),
    accumulated_cross_share=float(found.accumulated_cross_share),
    mean_persistence=float(found.mean_persistence),
    soundness=float(found.soundness),
    shared_share=share,
    paper=" and ".join(filter(None, products)),
  )
  study.write(tables.GAIN_SUMMARY, [summary], "disturbance_gain")
  always = "" if share is None else f"; the shared expert is {share:.1%} of the FFN output's norm"
  return [
    f"disturbance gain: product {found.product:.2f}, relative {found.relative_product:.2f}, "
    f"persistence {found.mean_persistence:.2f}{always}"
  ]


def states(study: studies.Study, condition: Condition) -> tuple[np.ndarray, float | None]:
  """float32 [L, B, T, D], the states after blocks of scored tokens; and the shared share."""
  tokens = study.tokens[:ROWS]
  execution = whole(
    condition.execution.rows(slice(len(tokens))),
    study.model.config,
    len(tokens),
    study.length - 1,
  )
  trace = score(
    study.model, tokens, study.prefill, execution, mode=condition.mode, taps=_TAPS
  ).trace
  keep = slice(study.prefill - 1, None)
  blocks = np.asarray(trace["post_block"])[:, :, keep]
  return blocks.reshape(*blocks.shape[:3], -1), shared_share(study, trace, keep)


def shared_share(study: studies.Study, trace, keep) -> float | None:
  """The mean over tokens and MoE layers of |shared| / (|shared| + |routed|)."""
  if "shared" not in trace:
    return None
  layers = list(study.model.config.moe_layers)
  norms = [
    np.linalg.norm(np.asarray(trace[name])[layers][:, :, keep], axis=-1)
    for name in ("shared", "routed")
  ]
  return float((norms[0] / (norms[0] + norms[1])).mean())


if __name__ == "__main__":
  studies.main(run)
