"""Greedy text from a checkpoint, under any contract.

    python -m experiments.generate --model=DIR --prompt="why the sheep"
    python -m experiments.generate --model=DIR --prompt=... --prompt=... --scheme=B --order_seed=3

Seconds for a small model, most of them compilation. Several prompts run as one batch; what they
share is computed once. Prints each text, its token ids and where the largest logit was tied; with
--out also run.json and generations.jsonl. Text is for reading: the token ids are the result.
"""

import json
import pathlib

from absl import app, flags

from experiments import model_flags
from moejax import inference
from moejax.report import files, record

_PROMPT = flags.DEFINE_multi_string("prompt", None, "Text to continue; repeat for a batch.")
_TOKEN_IDS = flags.DEFINE_multi_string(
  "token_ids", None, "Comma-separated ids instead of text; repeat for a batch."
)
_NEW = flags.DEFINE_integer("max_new_tokens", 48, "Tokens to emit.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", None, "Tokens per prefill call; none: all.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Folder to write to; none: print only.")


def main(_):
  if bool(_PROMPT.value) == bool(_TOKEN_IDS.value):
    raise app.UsageError("give either --prompt or --token_ids.")
  try:
    run()
  except (ValueError, FileNotFoundError, FloatingPointError) as error:
    raise SystemExit(f"generate: {error}") from None


def run():
  """Loads, generates, prints and writes."""
  model, mode = model_flags.load(), model_flags.mode()
  prompts = read_prompts(model)
  generation = inference.generate(
    model, prompts, _NEW.value, model_flags.execution(model), mode=mode, chunk=_CHUNK.value
  )
  rows = []
  for index, prompt in enumerate(prompts):
    new = generation.tokens[index].tolist()
    ties = generation.ties[index].nonzero()[0].tolist()
    text, unknown = None, []
    if model.tokenizer:
      text, unknown = model.tokenizer.decode([*prompt, *new]), model.tokenizer.unknown(new)
    row = dict(prompt_ids=prompt, token_ids=new, tied_steps=ties, unknown_ids=unknown, text=text)
    rows.append(row)
    print(text if text is not None else "(no tokenizer)")
    print(f"  token ids: {','.join(map(str, new))}")
    print(f"  tied steps: {ties or 'none'}; ids beyond the vocabulary: {unknown or 'none'}")
  if _OUT.value:
    out = pathlib.Path(_OUT.value)
    run_record = record.run_record(model, mode, **model_flags.record())
    record.write_json(out / "run.json", run_record)
    with files.atomic_path(out / "generations.jsonl") as path:
      lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
      path.write_text("".join(lines), encoding="utf-8")


def read_prompts(model) -> list[list[int]]:
  """Token ids of each prompt."""
  if _TOKEN_IDS.value:
    return [[int(i) for i in ids.split(",")] for ids in _TOKEN_IDS.value]
  if model.tokenizer is None:
    raise ValueError(f"{model.name} has no tokenizer.json: give --token_ids.")
  return [model.tokenizer.encode(text) for text in _PROMPT.value]


if __name__ == "__main__":
  app.run(main)
