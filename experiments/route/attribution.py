"""Where routed damage sits: by what changed, by its sign, and by the layer of the route.

    python -m experiments.route.attribution --model=olmoe-nano --out=out/route

attribution.tsv, tax.tsv, layers.tsv and attribution.svg. A share is an attribution, not an effect
to add up; what imposing a layer's routes does is run, on the first 24 sequences. A minute for
a nano model.
"""

import numpy as np

from experiments.route import study as studies
from experiments.route.measure import estimate, mean_of
from moejax.analysis.attribution import masks, shares, signed_flip_tax
from moejax.inference import Condition, Routed, run_routed
from moejax.models import Pins
from moejax.report import route_figures
from moejax.report import route_tables as tables

TABLES = (tables.ATTRIBUTION, tables.TAX, tables.LAYERS)
SEQUENCES = 24  # of the runs by layer


def run(study: studies.Study) -> list[str]:
  """Writes tables and a figure; returns what to say."""
  harm = study.four.route_forward
  flips = study.four.flips()[study.routers]
  by_mask = mask_rows(study, harm, flips)
  study.write(tables.ATTRIBUTION, by_mask, "attribution")
  scopes = {"scoring layer": flips[-1], "any layer": flips.any(axis=0)}
  taxes = [tax_row(study, harm, *scope) for scope in scopes.items()]
  study.write(tables.TAX, taxes, "attribution")
  layers = layer_rows(study)
  study.write(tables.LAYERS, layers, "attribution")
  parts = {row["mask"]: row["share"] for row in by_mask}
  if None not in parts.values():
    route_figures.draw_attribution(study.out / "attribution", layers, parts)
  deepest = max(layers, key=lambda row: row["pin_only"])
  named = (f"{name} {share:.2f}" for name, share in parts.items() if share is not None)
  cancelled = taxes[1]["cancellation"]
  return [
    f"attribution: {', '.join(named) or 'no routed harm'} of the routed harm; harmful and "
    f"beneficial flips cancel to {'nothing' if cancelled is None else format(cancelled, '.2f')}",
    f"attribution: pinning layer {deepest['layer']} alone recovers most, "
    f"{deepest['pin_only']:.4f} nats",
  ]


def mask_rows(study: studies.Study, harm: np.ndarray, flips: np.ndarray) -> list[dict]:
  """A row for each mask; shares of the signed sum, none where that is zero."""
  kinds = masks(flips)
  signed = shares(harm, kinds) if harm.sum() else (None,) * 3
  rows = []
  for field, mask, share in zip(kinds._fields, kinds, signed):
    name = field.rstrip("_")
    rows.append(
      dict(
        mask=name,
        masked_tokens=int(mask.sum()),
        harm=float(harm[mask].sum()),
        share=share,
        paper=study.paper("attribution", name, "share"),
      )
    )
  return rows


def tax_row(study: studies.Study, harm: np.ndarray, scope: str, flipped: np.ndarray) -> dict:
  """Harmful against beneficial flips."""
  tax = signed_flip_tax(harm, flipped)
  names = ("flips", "harmful", "beneficial", "net", "harmful_mean", "beneficial_mean")
  return dict(
    scope=scope,
    cancellation=tax.cancellation,
    paper=study.paper("tax", "", "cancellation"),
    **{name: getattr(tax, name) for name in names},
  )


def layer_rows(study: studies.Study) -> list[dict]:
  """Four runs for each layer where a router decides."""
  count = min(SEQUENCES, study.num_sequences)
  tokens, four = study.tokens[:count], study.four
  clean, own = Condition(study.mode), (slice(None), slice(count))

  def loss(condition: Condition, origin: Routed, layers: np.ndarray) -> np.ndarray:
    routes = (x[own] for x in (origin.ids, origin.weights, origin.slots))
    pins = Pins(*routes, layers[:, None, None])
    found = run_routed(study.model, tokens, condition, pins, prefill=study.prefill)
    return found.nll.astype(np.float64)

  qf, cc = (run.nll[:count].astype(np.float64) for run in (four.qf, four.cc))
  flips, rows = four.flips(), []
  decides = np.isin(np.arange(study.model.config.num_layers), study.routers)
  for layer in study.progress(study.routers, "layers"):
    only = np.arange(len(decides)) == layer
    pin_only = qf - loss(study.disturbed, four.cc, only)
    transplant_only = loss(clean, four.qf, only) - cc
    found = dict(
      pin_only=pin_only,
      pin_others=qf - loss(study.disturbed, four.cc, decides & ~only),
      transplant_only=transplant_only,
      transplant_others=loss(clean, four.qf, decides & ~only) - cc,
      interaction=pin_only - transplant_only,
    )
    row = dict(layer=layer, flip_rate=float(flips[layer, :count].mean()), sequences=count)
    row["tokens"] = count * pin_only.shape[1]
    for name, values in found.items():
      row |= estimate(name, mean_of(values, study.seed))
    rows.append(row)
  return rows


if __name__ == "__main__":
  studies.main(run)
