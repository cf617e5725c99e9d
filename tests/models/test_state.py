"""Persistent state and configuration: what they hold, how much, and that both come back whole."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models import (
  config_from_hf,
  export,
  family_of,
  flatten,
  init_params,
  Mode,
  num_parameters,
  persistent_state_size,
  restore,
  Taps,
)
from moejax.models.deepseek_v4 import distinct_experts
from moejax.models.deepseek_v4_config import CSA, HCA, WINDOW
from moejax.models.parameters import parameter_dtype
from moejax.numerics import fingerprint
from tests.models import tiny
from tests.models.tiny import BATCH, call, CAPACITY, differences, draw_tokens, LENGTH
from tests.oracles import assert_same_bits, bits
from tests.references import cases

TOKENS = draw_tokens(BATCH)
V4_FLASH = dict(
  model_type="deepseek_v4",
  vocab_size=129280,
  num_hidden_layers=43,
  hidden_size=4096,
  num_attention_heads=64,
  num_key_value_heads=1,
  head_dim=512,
  qk_rope_head_dim=64,
  q_lora_rank=1024,
  o_groups=8,
  o_lora_rank=1024,
  sliding_window=128,
  n_routed_experts=256,
  n_shared_experts=1,
  num_experts_per_tok=6,
  moe_intermediate_size=2048,
  num_hash_layers=3,
  scoring_func="sqrtsoftplus",
  topk_method="noaux_tc",
  norm_topk_prob=True,
  routed_scaling_factor=1.5,
  swiglu_limit=10.0,
  hc_mult=4,
  hc_sinkhorn_iters=20,
  hc_eps=1e-6,
  rms_norm_eps=1e-6,
  index_n_heads=64,
  index_head_dim=128,
  index_topk=512,
  num_nextn_predict_layers=1,
  rope_theta=10000,
  compress_rope_theta=160000,
  max_position_embeddings=1048576,
  rope_scaling=dict(
    type="yarn",
    factor=16,
    original_max_position_embeddings=65536,
    beta_fast=32,
    beta_slow=1,
  ),
  tie_word_embeddings=False,
  bos_token_id=0,
  eos_token_id=1,
  compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0],
)

# Published sizes, and the number of parameters that their papers and cards give, in 10^9.
RELEASES = {
  "DeepSeek-V4-Flash": (V4_FLASH, 284, 0.01),
  "OLMoE-1B-7B": (
    dict(
      model_type="olmoe",
      vocab_size=50304,
      hidden_size=2048,
      intermediate_size=1024,
      num_hidden_layers=16,
      num_attention_heads=16,
      num_key_value_heads=16,
      num_experts=64,
      num_experts_per_tok=8,
      max_position_embeddings=4096,
    ),
    6.92,
    0.003,
  ),
  "Qwen1.5-MoE-A2.7B": (
    dict(
      model_type="qwen2_moe",
      vocab_size=151936,
      hidden_size=2048,
      intermediate_size=5632,
      moe_intermediate_size=1408,
      shared_expert_intermediate_size=5632,
      num_hidden_layers=24,
      num_attention_heads=16,
      num_key_value_heads=16,
      num_experts=60,
      num_experts_per_tok=4,
      max_position_embeddings=8192,
    ),
    14.3,
    0.003,
  ),
  "Qwen3-30B-A3B": (
    dict(
      model_type="qwen3_moe",
      vocab_size=151936,
      hidden_size=2048,
      intermediate_size=6144,
      moe_intermediate_size=768,
      num_hidden_layers=48,
      num_attention_heads=32,
      num_key_value_heads=4,
      head_dim=128,
      num_experts=128,
      num_experts_per_tok=8,
      max_position_embeddings=40960,
    ),
    30.5,
    0.003,
  ),
  "deepseek-moe-16b": (
    dict(
      model_type="deepseek",
      vocab_size=102400,
      hidden_size=2048,
      intermediate_size=10944,
      moe_intermediate_size=1408,
      num_hidden_layers=28,
      num_attention_heads=16,
      num_key_value_heads=16,
      n_routed_experts=64,
      n_shared_experts=2,
      num_experts_per_tok=6,
      first_k_dense_replace=1,
      moe_layer_freq=1,
      max_position_embeddings=4096,
    ),
    16.4,
    0.003,
  ),
  "Mixtral-8x7B": (
    dict(
      model_type="mixtral",
      vocab_size=32000,
      hidden_size=4096,
      intermediate_size=14336,
      num_hidden_layers=32,
      num_attention_heads=32,
      num_key_value_heads=8,
      num_local_experts=8,
      num_experts_per_tok=2,
      max_position_embeddings=32768,
    ),
    46.7,
    0.003,
  ),
}


@pytest.fixture(params=tiny.FAMILIES, scope="module")
def model(request):
  return tiny.tiny(request.param)


@pytest.fixture(scope="module")
def v4():
  return tiny.tiny("deepseek_v4")


# Sizes of the releases.


@pytest.mark.parametrize("release", list(RELEASES))
def test_number_of_parameters(release):
  fields, billions, tolerance = RELEASES[release]
  assert num_parameters(config_from_hf(fields)) == pytest.approx(billions * 1e9, rel=tolerance)


@pytest.mark.parametrize(
  "position, size", [(2, 5_869_568), (3, 5_883_008), (127, 6_309_888), (255, 6_750_208)]
)
def test_v4_flash_state_has_the_size_of_the_paper(position, size):
  config = config_from_hf(V4_FLASH)
  assert persistent_state_size(config, position) == size
  entries = 13_440 * ((position + 1) // 4) + 10_240 * ((position + 1) // 128)
  assert size == 2_818_048 + 430_080 + 2_621_440 + entries


def test_v4_flash_layers():
  config = config_from_hf(V4_FLASH)
  assert [config.kinds.count(kind) for kind in (WINDOW, CSA, HCA)] == [2, 21, 20]
  assert config.kinds[:4] == (WINDOW, WINDOW, CSA, HCA) and config.kinds[-1] == CSA
  assert config.ratios == (0, 0, *(4, 128) * 20, 4)
  assert config.hash_layers == (0, 1, 2)
  assert config.moe_layers == tuple(range(43))


def test_v4_flash_post_block_state_has_16384_values():
  config = config_from_hf(V4_FLASH)
  config = dataclasses.replace(
    config, num_layers=1, kinds=config.kinds[:1], ratios=(0,), hash_layers=(0,), moe_layers=(0,)
  )
  module = family_of(config)(config)
  params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  state, tokens = module.init_state(1, 1), jnp.zeros((1, 1), jnp.int32)
  run = lambda params: module.apply(params, tokens, state, taps=Taps(post_block=True))
  post_block = jax.eval_shape(run, params)[2]["post_block"]
  assert post_block.shape == (1, 1, 1, 4, 4096) and math.prod(post_block.shape) == 16_384


@pytest.mark.parametrize("release", [name for name in RELEASES if name != "DeepSeek-V4-Flash"])
def test_size_of_keys_and_values(release):
  config = config_from_hf(RELEASES[release][0])
  each = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  assert [persistent_state_size(config, p) for p in (0, 9)] == [each, 10 * each]


# Export.

POSITIONS = (21, 13, 24, 1)


def random_state(model, positions=POSITIONS):
  """A state with rubbish wherever something can be, in use or not."""
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
  state = model.module.init_state(len(positions), LENGTH)
  layers = jax.tree.map(draw, state.layers)
  return state.replace(position=jnp.asarray(positions, jnp.int32), layers=layers)


@pytest.mark.parametrize("row", range(len(POSITIONS)))
@pytest.mark.parametrize("length", [LENGTH, CAPACITY])
def test_export_comes_back(model, row, length):
  exported = export(random_state(model), row)
  template = model.module.init_state(1, length)
  again = restore(exported, template, POSITIONS[row])
  assert again.position.tolist() == [POSITIONS[row]] and again.length == length
  for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(template)):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
  found = export(again)
  assert list(found) == list(exported)
  for name, x in exported.items():
    assert x.dtype == np.float32
    assert_same_bits(found[name], x)


def test_flattened_state_has_every_value(model):
  state = random_state(model)
  for row, position in enumerate(POSITIONS):
    flat, exported = flatten(state, row), export(state, row)
    assert_same_bits(flat, np.concatenate([x.ravel() for x in exported.values()]))
    assert flat.shape == (persistent_state_size(model.config, position - 1),)


def test_a_restored_state_goes_on_as_the_run_did(model):
  whole = tiny.run(model, TOKENS[:1], tiny.CHUNK)
  before = tiny.run(model, TOKENS[:1, : tiny.FORK], tiny.CHUNK).state
  state = restore(export(before), model.module.init_state(1, LENGTH), tiny.FORK)
  result = tiny.run(model, TOKENS[:1, tiny.FORK :], tiny.CHUNK, state)
  assert differences(result, whole.tokens(None, start=tiny.FORK)) == []


def test_layers_ascend_and_parts_are_in_canonical_order(v4):
  shapes = {name: x.shape for name, x in export(random_state(v4)).items()}
  of = lambda owner: [f"{owner}.entries", f"{owner}.values", f"{owner}.scores"]
  csa = ["window", *of("compressor"), *of("indexer")]
  parts = [["window"], csa, ["window", *of("compressor")], csa]
  assert list(shapes) == [f"layers.{i}.{part}" for i, each in enumerate(parts) for part in each]
  assert shapes["layers.0.window"] == (8, 16)
  assert shapes["layers.1.compressor.entries"] == (5, 16)
  assert shapes["layers.1.compressor.values"] == (8, 32)
  assert shapes["layers.2.compressor.entries"] == (2, 16)
  assert shapes["layers.2.compressor.scores"] == (8, 16)


def test_restore_refuses_what_is_not_of_the_config(model):
  template, position = model.module.init_state(1, LENGTH), POSITIONS[0]
  exported = export(random_state(model))
  name = next(iter(exported))
  for change, message in (
    ({k: v for k, v in exported.items() if k != name}, f"{name} is missing"),
    (exported | {"layers.9.keys": exported[name]}, r"layers\.9\.keys is unknown"),
    (exported | {name: exported[name][..., :-1]}, rf"{name} is \(.*\), expected \("),
  ):
    with pytest.raises(ValueError, match=message):
      restore(change, template, position)
  with pytest.raises(ValueError, match="position 25 is beyond the 24 of the state"):
    restore(exported, template, LENGTH + 1)


def test_rows_of_a_state(model):
  state = random_state(model)
  for index in (slice(1, 3), np.array([2, 1]), np.array([3])):
    some, rows = state.rows(index), np.arange(len(POSITIONS))[index]
    assert some.length == state.length and len(some.position) == len(rows)
    for i, row in enumerate(rows):
      assert_same_bits(flatten(some, i), flatten(state, row))


@pytest.mark.parametrize("position, closed", [(8, True), (12, True), (20, True), (9, False)])
def test_a_closed_window_is_on_both_halves_of_a_csa_layer(v4, position, closed):
  """Rows 4 .. 7 are copied onto rows 0 .. 3 when the window closes, and stay until overwritten."""
  exported = export(tiny.alone(v4, TOKENS[0, :position]).state)
  for layer in (1, 3):
    for owner in ("compressor", "indexer"):
      for part in ("values", "scores"):
        rows = exported[f"layers.{layer}.{owner}.{part}"]
        same = bits(rows[:4]) == bits(rows[4:])
        assert same[0].all() == closed and same[1:].all()


def test_an_empty_v4_state(v4):
  for name, x in export(v4.module.init_state(1, LENGTH)).items():
    assert (x == (-np.inf if name.endswith("scores") else 0)).all()
    assert not name.endswith("entries") or len(x) == 0


# Fingerprints.


def changed_leaf(state, at, index, value=None):
  """A host state with one bit of its leaf `at` flipped, or an element of it replaced."""
  leaves, tree = jax.tree.flatten(state)
  x = np.array(leaves[at])
  if value is None:
    x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)[index] ^= 1
  else:
    x[index] = value
  return jax.tree.unflatten(tree, [*leaves[:at], x, *leaves[at + 1 :]])


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v4"])
def test_fingerprints_see_each_bit_in_use_and_no_other(family):
  model = tiny.tiny(family)
  state = jax.device_get(random_state(model, POSITIONS[:1]))
  prints = np.asarray(tiny.state_fingerprints(state))
  of_layer = [i for i, layer in enumerate(state.layers) for _ in jax.tree.leaves(layer)]
  for at, leaf in enumerate(jax.tree.leaves(state)[1:], start=1):
    first = (0,) * leaf.ndim
    found = np.asarray(tiny.state_fingerprints(changed_leaf(state, at, first)))
    same = (found == prints).all(axis=-1)[:, 0]
    assert np.flatnonzero(~same).tolist() == [of_layer[at - 1]]
    last = (0,) * (leaf.ndim - 2) + (-1, -1)
    unused = leaf.shape[-2] in (LENGTH, LENGTH // 4, LENGTH // 8) and leaf.dtype != np.float32
    found = tiny.state_fingerprints(changed_leaf(state, at, last, value=3))
    assert (np.asarray(found) == prints).all() == unused


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v4"])
def test_fingerprints_tell_zeros_in_use_from_none(family):
  empty = tiny.tiny(family).module.init_state(1, LENGTH)
  one, other = (
    np.asarray(tiny.state_fingerprints(empty.replace(position=jnp.array([n])))) for n in (8, 16)
  )
  window_only = 1 if family == "deepseek_v4" else 0
  np.testing.assert_array_equal(one[:window_only], other[:window_only])
  assert (one != other).any(axis=-1)[window_only:].all()


def test_tapped_fingerprints():
  model = tiny.tiny("olmoe")
  taps = Taps(post_block=True, block_fingerprints=True, state_fingerprints=True)
  result = call(model, TOKENS[:1, : tiny.CHUNK], model.module.init_state(1, LENGTH), taps=taps)
  prints = tiny.state_fingerprints(result.state)
  np.testing.assert_array_equal(result.trace["state_fingerprints"], prints)
  blocks = fingerprint(jnp.asarray(result.trace["post_block"]))
  np.testing.assert_array_equal(result.trace["block_fingerprints"], blocks)


# Configs and parameters.


def test_tensors_are_the_parameters(model):
  """Names, shapes and dtypes of `tensors`, of flax's own init and of `init_params` agree."""
  config, module = model.config, model.module
  mode = Mode("fast", "float32")
  state, tokens = module.init_state(1, 1, mode), jnp.zeros((1, 1), jnp.int32)
  inits = {
    "float32": jax.eval_shape(lambda: module.init(jax.random.key(0), tokens, state, mode=mode)),
    "bfloat16": jax.eval_shape(lambda: init_params(config, jax.random.key(0))),
  }
  want = {tensor.path: tensor for tensor in module.tensors(config)}
  assert len(want) == len(module.tensors(config))
  for dtype, init in inits.items():
    found = jax.tree_util.tree_flatten_with_path(init["params"])[0]
    found = {tuple(entry.key for entry in path): x for path, x in found}
    assert {path: x.shape for path, x in found.items()} == {p: t.shape for p, t in want.items()}
    assert all(x.dtype == parameter_dtype(want[path], dtype) for path, x in found.items())


def test_tables_of_experts_are_no_weights(model):
  weights = [x for x in jax.tree.leaves(model.params) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert num_parameters(model.config) == sum(x.size for x in weights)
  tables = len(jax.tree.leaves(model.params)) - len(weights)
  assert tables == len(getattr(model.config, "hash_layers", ()))


def test_random_hash_tables_have_distinct_experts():
  one, other = (np.asarray(distinct_experts(jax.random.key(i), (61, 5), 11)) for i in range(2))
  assert one.shape == (61, 5) and one.dtype == np.int32 and (one != other).any()
  assert (np.diff(np.sort(one)) > 0).all() and set(one.ravel()) == set(range(11))


@pytest.mark.parametrize(
  "fields",
  [
    *(pytest.param(tiny.FIELDS[family], id=family) for family in tiny.FAMILIES),
    *(pytest.param(case.config, id=name) for name, case in cases.CASES.items()),
    *(pytest.param(fields, id=name) for name, (fields, *_) in RELEASES.items()),
  ],
)
def test_config_comes_back_from_its_file(fields):
  config = config_from_hf(fields)
  assert config_from_hf(family_of(config).write_config(config)) == config
  assert hash(config) == hash(config_from_hf(fields))
