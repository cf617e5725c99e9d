"""Routes, margins and states of one prompt and its greedy continuation.

    python -m experiments.trace --model=DIR --prompt="why the sheep" --out=out/trace

Seconds for a small model. Written to --out: routes.tsv (one row per position and MoE layer),
states.safetensors (post_block, router_logits: [layer, position, ...]), persistent_state.safetensors
(every tensor of the state after the last position, without padding), run.json.
"""

import pathlib

from absl import app, flags
import numpy as np

from experiments import model_flags
from moejax import inference
from moejax.models import Taps
from moejax.report import record, tables, traces

_PROMPT = flags.DEFINE_string("prompt", None, "Text to run.")
_TOKEN_IDS = flags.DEFINE_list("token_ids", None, "Token ids instead of text.")
_NEW = flags.DEFINE_integer("max_new_tokens", 8, "Greedy tokens to go on with.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "out/trace", "Folder to write to.")


def main(_):
  if (_PROMPT.value is None) == (_TOKEN_IDS.value is None):
    raise app.UsageError("give either --prompt or --token_ids.")
  try:
    run(pathlib.Path(_OUT.value))
  except (ValueError, FileNotFoundError, FloatingPointError) as error:
    raise SystemExit(f"trace: {error}") from None


def run(out):
  """Generates, then traces the whole sequence in one teacher-forced pass: the same bits."""
  model, mode = model_flags.load(), model_flags.mode()
  execution = model_flags.execution(model)
  if _TOKEN_IDS.value is not None:
    prompt = [int(i) for i in _TOKEN_IDS.value]
  elif model.tokenizer is None:
    raise ValueError(f"{model.name} has no tokenizer.json: give --token_ids.")
  else:
    prompt = model.tokenizer.encode(_PROMPT.value)
  generation = inference.generate(model, [prompt], _NEW.value, execution, mode=mode)
  tokens = [*prompt, *generation.tokens[0].tolist()]
  taps = Taps.routes(post_block=True)
  _, state, trace = inference.prefill(model, [tokens], len(tokens), execution, mode=mode, taps=taps)
  rows = traces.route_rows(model.config, trace, tokens)
  tables.write_tsv(out / "routes.tsv", traces.ROUTES, rows)
  states = {
    name: np.asarray(trace[name])[:, 0, : len(tokens)] for name in ("post_block", "router_logits")
  }
  traces.write_tensors(out / "states.safetensors", states)
  traces.write_tensors(out / "persistent_state.safetensors", traces.state_tensors(state))
  more = dict(prompt_ids=prompt, token_ids=tokens[len(prompt) :], **model_flags.record())
  record.write_json(out / "run.json", record.run_record(model, mode, **more))
  ties = int(np.asarray(trace["ties"])[:, 0, : len(tokens)].sum())
  print(f"{len(tokens)} tokens, {len(model.config.moe_layers)} MoE layers, {ties} boundary ties")
  print(f"written: {out}/routes.tsv, states.safetensors, persistent_state.safetensors, run.json")


if __name__ == "__main__":
  app.run(main)
