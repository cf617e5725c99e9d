"""A directory as a model and back: config, weights, tokenizer, and a hash of what was read."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import models
from moejax.checkpoints import files, load, LoadedModel, save, Tokenizer
from tests.checkpoints.test_tokenizer import BOS, make

FIELDS = {
  "architectures": ["OlmoeForCausalLM"],
  "model_type": "olmoe",
  "vocab_size": 259,
  "hidden_size": 8,
  "intermediate_size": 6,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "num_experts": 3,
  "num_experts_per_tok": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e4,
  "bos_token_id": BOS,
  "eos_token_id": 258,
}


@pytest.fixture
def checkpoint(tmp_path):
  """(directory, params as they were saved)."""
  config = models.config_from_hf(FIELDS)
  family, rng, params = models.family_of(config), np.random.default_rng(0), {}
  for tensor in family.tensors(config):
    *parents, last = tensor.path
    node = params
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = jnp.asarray(0.5 + rng.random(tensor.shape), jnp.bfloat16)
  params = {"params": params}
  make(tmp_path / "tok", {"add_bos_token": True})
  tokenizer = Tokenizer.from_directory(tmp_path / "tok", BOS)
  save(tmp_path / "tiny", family(config), params, tokenizer)
  return tmp_path / "tiny", params


def assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_what_was_saved_is_loaded(checkpoint):
  directory, params = checkpoint
  model = load(directory)
  assert isinstance(model, LoadedModel)
  assert model.family == "olmoe" and model.name == "tiny" and model.tokenizer.bos_id == BOS
  assert model.config == models.config_from_hf(FIELDS) == model.module.config
  assert_equal(model.params, params)
  weights = (directory / "model.safetensors").read_bytes()
  assert model.sha256 == hashlib.sha256(weights).hexdigest()


def test_the_hash_goes_over_shards_in_order(checkpoint):
  directory, params = checkpoint
  tensors = [(name, entry.read()) for name, entry in files.open_checkpoint(directory).items()]
  # The last tensors first, so that the order of names in the index is not that of the files.
  files.write_checkpoint(directory, reversed(tensors), max_shard_bytes=1000)
  shards = sorted(directory.glob("model-*.safetensors"))
  assert len(shards) > 3
  model = load(directory)
  assert_equal(model.params, params)
  weights = b"".join(path.read_bytes() for path in shards)
  assert model.sha256 == hashlib.sha256(weights).hexdigest()


def test_it_runs(checkpoint):
  model = load(checkpoint[0], dtype="float32")
  tokens = jnp.asarray([model.tokenizer.encode("then")], jnp.int32)
  mode, taps = models.Mode(arithmetic="fast", rounding="float32"), models.Taps(ids=True)
  # A state of another mode than apply's would be refused.
  state = model.init_state(1, 8, mode=mode)
  apply = jax.jit(model.apply, static_argnames=("mode", "taps"))
  logits, state, trace = apply(model.params, tokens, state, models.NATIVE, mode=mode, taps=taps)
  assert logits.shape == (1, 4, 259) and np.isfinite(logits).all()
  assert set(trace) == {"ids"} and state.position == 4


def test_it_runs_canonically_unless_told_otherwise(checkpoint):
  model = load(checkpoint[0])
  tokens, state = jnp.zeros((1, 2), jnp.int32), model.init_state(1, 8)
  logits, after, trace = jax.eval_shape(model.apply, model.params, tokens, state)
  assert logits.shape == (1, 2, 259) and not trace
  assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_model_or_its_config_can_be_saved(checkpoint, tmp_path):
  model = load(checkpoint[0], dtype="float32")
  for name, saved in (("loaded", model), ("config", model.config)):
    save(tmp_path / name, saved, model.params, dtype="float32")
    again = load(tmp_path / name, dtype="float32")
    assert_equal(again.params, model.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(again.params)} == {jnp.dtype(jnp.float32)}
    assert again.config == model.config and again.tokenizer is None


def test_no_model(tmp_path):
  message = r"no model named 'tiny-moe': expected a directory with config.json"
  with pytest.raises(FileNotFoundError, match=message):
    load("tiny-moe")
  with pytest.raises(FileNotFoundError, match=r"no model named .*: expected a directory with"):
    load(tmp_path)


def test_damaged_config(checkpoint):
  directory, _ = checkpoint
  config = directory / "config.json"
  fields = json.loads(config.read_text())
  config.write_text(json.dumps({**fields, "model_type": "gpt2"}))
  with pytest.raises(ValueError, match=r"unknown model_type 'gpt2'"):
    load(directory)
  config.write_text("[1")
  with pytest.raises(ValueError, match=r"config.json: expected a JSON object"):
    load(directory)
