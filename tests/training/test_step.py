"""One optimiser step: the loss falls, gradients are right, experts are balanced."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models.families import family_of
from moejax.training import Recipe
from moejax.training.initial import initial_params
from moejax.training.recipe import _dimension_numbers, Phase
from moejax.training.step import join, loss, repetition, split, step
from tests.models import tiny

RECIPE = Recipe(tokens=8 * 16 * 60, batch=8, length=16, peak_rate=0.02, warmup_steps=5)


def language(rows, seed):
  """A first-order language: each of 61 tokens has two successors. int32 [rows, 17]."""
  rng = np.random.default_rng(seed)
  successors = np.random.default_rng(99).integers(0, 61, (61, 2))
  tokens = rng.integers(0, 61, (rows, 1))
  for _ in range(16):
    following = successors[tokens[:, -1], rng.integers(0, 2, rows)]
    tokens = np.concatenate([tokens, following[:, None]], axis=1)
  return tokens.astype(np.int32)


@functools.cache
def small(family):
  """A tiny config; of DeepSeek-V4 three layers, one of each kind, the last one with a router.

  Its indexer keeps everything and its experts are hardly clamped: where a choice changes, there is
  no derivative.
  """
  config = tiny.tiny(family).config
  if family == "deepseek_v4":
    config = dataclasses.replace(
      config,
      num_layers=3,
      moe_layers=(0, 1, 2),
      kinds=config.kinds[:3],
      ratios=config.ratios[:3],
      index_topk=16,
      swiglu_limit=10.0,
    )
  return config


def start(family):
  config = small(family)
  return config, initial_params(config, np.ones(config.vocab_size), 0)


@functools.cache
def trained(family, rounded):
  """(metrics of every step, parameters before, and after 60 steps)."""
  config, params = start(family)
  before = jax.device_get(params)
  state, history = RECIPE.optimizer().init(split(params)[0]["params"]), []
  fixed = dict(config=config, recipe=RECIPE, phase=Phase(rounded))
  for number in range(RECIPE.steps):
    params, state, metrics = step(
      params, state, jnp.asarray(language(8, number)), jnp.int32(0), **fixed
    )
    history.append(jax.device_get(metrics))
  return history, before, jax.device_get(params)


@pytest.mark.parametrize(
  ("family", "rounded"), [("olmoe", False), ("olmoe", True), ("deepseek_v4", False)]
)
def test_the_loss_falls_on_a_synthetic_language(family, rounded):
  history, _, _ = trained(family, rounded)
  nll = [m["nll"] for m in history]
  assert abs(nll[0] - np.log(61) - 0.5) < 0.2  # logits of unit variance
  assert np.mean(nll[-5:]) < 2.0  # log 2 is the best there is
  load = history[-1]["load"]
  assert load.shape == (small(family).num_layers, 11)
  assert np.allclose(load.mean(axis=1), 1, atol=1e-5)


def test_what_is_not_learned_stays():
  config = small("deepseek_v4")
  _, before, after = trained("deepseek_v4", False)
  moved = {}
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(before["params"]), jax.tree.leaves(after["params"])
  ):
    moved[".".join(entry.key for entry in path)] = bool((a != b).any())
  kept = {name for name, m in moved.items() if not m}
  assert kept == {n for n in moved if "indexer" in n or "hash_table" in n}
  assert {n for n in moved if n.endswith("router_bias")} == {
    f"layers_{layer}.moe.router_bias"
    for layer in range(config.num_layers)
    if layer not in config.hash_layers
  }


def test_the_score_bias_moves_toward_balance():
  history, before, after = trained("deepseek_v4", False)
  layer = max(small("deepseek_v4").moe_layers)
  name = f"layers_{layer}"
  loads = np.array([m["load"][layer] for m in history])
  expected = np.zeros(11, np.float32)
  for load in loads:
    expected += np.float32(RECIPE.bias_rate) * np.sign(np.float32(1) - load)
  bias = after["params"][name]["moe"]["router_bias"]
  assert (before["params"][name]["moe"]["router_bias"] == 0).all()
  assert np.allclose(bias, expected, atol=1e-6)


def test_muon_has_the_matrices_and_adam_the_rest():
  for family in ("olmoe", "deepseek_v4", "qwen2_moe", "qwen3_moe", "deepseek"):
    config = tiny.tiny(family).config
    shapes = {t.path: t.shape for t in family_of(config).tensors(config)}
    params = tiny.draw(config, "float32")["params"]
    numbers = jax.tree_util.tree_leaves_with_path(
      _dimension_numbers(params), is_leaf=lambda x: x is None or hasattr(x, "output_axis")
    )
    adam = {path[-1].key for path, n in numbers if n is None}
    for path, n in numbers:
      shape = shapes[tuple(entry.key for entry in path)]
      assert n is None or (n.reduction_axis, n.output_axis) == (len(shape) - 2, len(shape) - 1)
    matrices = {path[-1] for path, shape in shapes.items() if len(shape) > 1} & adam
    assert matrices <= {
      "embed", "head", "router", "fn", "position_bias", "weights", "hash_table", "shared_gate",
    }, family  # fmt: skip


def test_repetition_is_the_price_of_trigrams_that_were_there_before():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 3, (2, 14)).astype(np.int32)
  log_p = np.array(jax.nn.log_softmax(jnp.asarray(rng.standard_normal((2, 13, 4)), jnp.float32)))
  total = 0.0
  for row, at in np.ndindex(2, 13):
    pairs = [tuple(tokens[row, i - 1 : i + 1]) for i in range(1, at + 1)]
    before = [i for i in range(1, at) if pairs[i - 1] == pairs[-1]]
    candidate = tokens[row, before[-1] + 1] if before else tokens[row, at + 1]
    if candidate != tokens[row, at + 1]:
      total -= np.log1p(-np.exp(np.float64(log_p[row, at, candidate])))
  assert total > 0
  found = repetition(jnp.asarray(log_p), jnp.asarray(tokens))
  assert float(found) == pytest.approx(total / 26, rel=1e-5)
  fresh = np.arange(14, dtype=np.int32)[None] % 14  # no pair comes twice
  assert float(repetition(jnp.full((1, 13, 14), -1.0), jnp.asarray(fresh))) == 0


@pytest.mark.parametrize("family", ["olmoe", pytest.param("deepseek_v4", marks=pytest.mark.slow)])
def test_gradients_agree_with_finite_differences(family):
  """Along the gradient of each kind of parameter, without rounding and with choices kept."""
  config, params = start(family)
  params = {"params": jax.tree.map(jnp.asarray, params["params"])}
  recipe, tokens = dataclasses.replace(RECIPE, router_z_loss=0.01), jnp.asarray(language(4, 5))
  (learned, rest), phase = split(params), Phase(repetition=True)
  objective = jax.jit(
    jax.value_and_grad(
      lambda learned: loss(config, recipe, join(learned, rest), tokens, phase), has_aux=True
    )
  )
  (_, metrics), gradients = objective(learned)
  leaves, tree = jax.tree.flatten(learned)
  grads = jax.tree.leaves(gradients)
  paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(learned)]
  checked = set()
  for index, grad in enumerate(grads):
    name = paths[index][-1].key
    norm = np.square(np.asarray(grad, np.float64)).sum()
    if (paths[index][1].key, name) in checked or norm < 1e-4:
      continue
    checked.add((paths[index][1].key, name))
    rise = 0.0008
    step = grad * np.float32(rise / norm)
    ends = []
    for sign in (1, -1):
      moved = [*leaves[:index], leaves[index] + sign * step, *leaves[index + 1 :]]
      (value, at), _ = objective(jax.tree.unflatten(tree, moved))
      if (at["load"] != metrics["load"]).any():
        break  # a choice of experts changed: not differentiable there
      ends.append(float(value))
    else:
      # Values near 4 have an error of about 2^-21; a longer step would leave curvature.
      assert (ends[0] - ends[1]) / 2 == pytest.approx(rise, rel=0.02), paths[index]
  assert len(checked) > 8
