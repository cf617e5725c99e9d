"""Live comparison with transformers (extra `parity`): it reads what we save; its cache, our state.

The combines of its expert layers are compared in `tests/combine/test_parity.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import checkpoints
from moejax.models import export, Mode
from tests.references import weights
from tests.references.cases import CASES, reference

# Warnings of the foreign libraries are theirs.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

FLOAT32 = Mode("fast", "float32")


def runner(case, directory):
  """The foreign model of a checkpoint; DeepSeek-MoE has none in transformers."""
  from tests.references import deepseek_moe, native

  return (deepseek_moe if case.family == "deepseek" else native).Runner(directory)


def steps(runner, tokens):
  """Feeds tokens [B, T] one by one: (logits [B, T, V], what its cache holds after each)."""
  import torch

  cache, logits, caches = runner.new_cache(), [], []
  with torch.inference_mode():
    for column in torch.from_numpy(tokens).long().split(1, dim=1):
      logits.append(runner.step(column, cache).logits.float().numpy())
      caches.append({k: v.copy() for k, v in runner.cache_arrays(cache).items()})
  return np.concatenate(logits, axis=1), caches


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_saved_checkpoints_are_read_as_the_same_model(name, dtype, tmp_path):
  import torch

  case, recorded = CASES[name], reference(name)
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path / "published"), dtype)
  checkpoints.save(tmp_path / "saved", model, model.params, dtype=dtype)
  if case.family != "deepseek":
    from tests.references import native

    report = native.load_report(tmp_path / "saved")
    assert report == dict(missing=[], unexpected=[], mismatched=[])
  foreign = runner(case, tmp_path / "saved")
  with torch.inference_mode():
    logits = foreign.step(torch.from_numpy(recorded["tokens"]).long(), foreign.new_cache()).logits
  np.testing.assert_allclose(logits.numpy(), recorded["logits"], rtol=0, atol=1e-4)


def states(case, directory, tokens):
  """Our state of each row after each token, and the parameters."""
  model = checkpoints.load(directory, "float32")
  apply = jax.jit(functools.partial(model.apply, mode=FLOAT32))
  state, out = model.init_state(*tokens.shape, FLOAT32), []
  for column in np.split(tokens, tokens.shape[1], axis=1):
    _, state, _ = apply(model.params, jnp.asarray(column), state)
    out.append([export(state, row) for row in range(len(tokens))])
  return out, model


@pytest.mark.parametrize("name", ["olmoe_clip", "qwen3_moe_base", "deepseek_norm"])
def test_keys_and_values_are_the_cache_of_transformers(name, tmp_path):
  case = CASES[name]
  directory, tokens = weights.write_checkpoint(case, tmp_path), weights.tokens(case)
  ours, model = states(case, directory, tokens)
  _, caches = steps(runner(case, directory), tokens)
  for time in (0, 5, case.length - 1):
    for row, state in enumerate(ours[time]):
      for layer in range(model.config.num_layers):
        for part in ("keys", "values"):
          mine, theirs = state[f"layers.{layer}.{part}"], caches[time][part][layer, row]
          np.testing.assert_allclose(mine[:, : time + 1], theirs, rtol=0, atol=1e-5)


def transformers_view(state, layer, position, config, bias):
  """Our state of a DeepSeek-V4 layer in the terms of transformers' cache (design page, 4c).

  Args:
    state: as exported after `position` tokens, of one row.
    layer: index.
    position: tokens read.
    config: ratios and window.
    bias: function of "compressor" or "indexer" → position bias [m, F].
  """
  out, prefix = {}, f"layers.{layer}."
  window, ratio = state[prefix + "window"], config.ratios[layer]
  held = range(max(0, position - config.window + 1), position)
  out["window"] = window[[p % config.window for p in held]]
  for part in ("compressor", "indexer"):
    if f"{prefix}{part}.entries" not in state:
      continue
    entries, values, scores = (
      state[f"{prefix}{part}.{name}"] for name in ("entries", "values", "scores")
    )
    count = position % ratio
    out[f"buffer_kv/{part}"] = values[-ratio:][:count]
    out[f"buffer_gate/{part}"] = scores[-ratio:][:count] - bias(part)[:count]
    out[f"compressed_kv/{part}"] = entries
    if len(values) == 2 * ratio and position >= ratio:
      half = values.shape[1] // 2
      out[f"overlap_kv/{part}"] = values[:ratio, :half]
      out[f"overlap_gate/{part}"] = scores[:ratio, :half]
  return out


@pytest.mark.parametrize("name", ["deepseek_v4_base", "deepseek_v4_keep_all"])
def test_v4_state_is_the_cache_of_transformers(name, tmp_path):
  case = CASES[name]
  directory, tokens = weights.write_checkpoint(case, tmp_path), weights.tokens(case)
  ours, model = states(case, directory, tokens)
  _, caches = steps(runner(case, directory), tokens)
  attention = lambda layer: model.params["params"][f"layers_{layer}"]["attention"]

  def bias(layer, part):
    owner = attention(layer) if part == "compressor" else attention(layer)["indexer"]
    return np.asarray(owner["compressor"]["position_bias"])

  for position in (1, 3, 4, 7, 8, 9, 17, 24, case.length):
    theirs = caches[position - 1]
    for row, state in enumerate(ours[position - 1]):
      seen = 0
      for layer in range(model.config.num_layers):
        of_layer = functools.partial(bias, layer)
        view = transformers_view(state, layer, position, model.config, of_layer)
        for part, value in view.items():
          expected = theirs[f"cache/{layer}/{part}"][row]
          np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-5, err_msg=part)
        seen += len(view)
      assert seen == len(theirs)
