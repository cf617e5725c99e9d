"""Routes: distinct experts, lowest ids among equals, unbiased weights, masks, tables, NaN."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import numerics
from moejax.models import Execution, router
from moejax.models.arithmetic import Canonical
from tests.models import tiny
from tests.models.forks import (
  assert_changes_only_what_follows,
  AT,
  empty,
  layer_of,
  TIME,
  TOKENS,
)
from tests.models.tiny import call, differences, native_fork
from tests.oracles import assert_same_bits, to_bf16


@pytest.fixture(params=tiny.FAMILIES, scope="module")
def model(request):
  return tiny.tiny(request.param)


@pytest.fixture(scope="module")
def v4():
  return tiny.tiny("deepseek_v4")


def test_ids_are_distinct_ascending_and_slots_permute_them(model):
  trace = native_fork(model).trace
  at = np.array(model.moe_layers)
  assert (np.diff(trace["ids"][at]) > 0).all()
  assert (trace["ids"][at] >= 0).all() and (trace["ids"] < model.config.num_experts).all()
  top_k = np.arange(model.config.top_k, dtype=np.int32)
  assert (np.sort(trace["slots"][at]) == top_k).all()
  dense = [i for i in range(model.config.num_layers) if i not in model.moe_layers]
  assert (trace["ids"][dense] == -1).all() and (trace["terms"][dense] == 0).all()


def router_scores(model, trace, layer):
  """float64 [B, T, E] from the traced logits: scores before any bias."""
  x = trace["router_logits"][layer].astype(np.float64)
  if model.config.family == "deepseek_v4":
    return np.sqrt(np.log1p(np.exp(x)))
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def test_weights_are_scores_normalised_where_the_config_says_so(model):
  c, trace = model.config, native_fork(model).trace
  normalised = tiny.FIELDS[c.family].get("norm_topk_prob", True)  # Mixtral always does
  rounded = c.family == "deepseek"  # scores and weights are BF16 there
  for layer in model.moe_layers:
    scores = router_scores(model, trace, layer)
    if rounded:
      scores = to_bf16(scores).astype(np.float64)
    chosen = np.take_along_axis(scores, trace["ids"][layer], -1)
    if normalised:
      chosen = chosen / chosen.sum(-1, keepdims=True) * getattr(c, "routed_scale", 1.0)
    # BF16: the sum, the quotient. float32: a few roundings each of exp, sums and quotients.
    tolerance = 2.0**-8 + 2.0**-9 if rounded else 2e-6
    np.testing.assert_allclose(trace["weights"][layer], chosen, rtol=tolerance)
    slots = np.take_along_axis(trace["weights"][layer], trace["slots"][layer], -1)
    if layer in model.top_k_layers and c.family != "deepseek_v4":
      assert (np.diff(slots) <= 0).all()  # best first


@pytest.mark.parametrize("normalize", [False, True])
def test_weigh_adds_in_slot_order(normalize):
  scores = np.random.default_rng(5).random((20, 30, 11), np.float32)
  ids = np.argsort(-scores)[..., :5].astype(np.int32)
  run = types.SimpleNamespace(ops=Canonical)
  weights = router.weigh(run, jnp.asarray(scores), jnp.asarray(ids), normalize=normalize)
  chosen = np.take_along_axis(scores, ids, -1)
  total = np.zeros((20, 30), np.float32)
  for slot in range(5):
    total = total + chosen[..., slot]
  assert_same_bits(weights, chosen / total[..., None] if normalize else chosen)


def test_select_takes_the_lowest_id_of_equals():
  scores = np.array([[[1, 3, 2, 3, 2, 2, 0.5]], [[0.0, -0.0, -1, 0.0, -0.0, -2, -3]]], np.float32)
  run = types.SimpleNamespace(execution=Execution())
  for top_k, expected, margins, ties in (
    (2, [[1, 3], [0, 1]], [1, 0], [False, True]),
    (3, [[1, 3, 2], [0, 1, 3]], [0, 0], [True, True]),
    (4, [[1, 3, 2, 4], [0, 1, 3, 4]], [0, 1], [True, False]),
    (7, [[1, 3, 2, 4, 5, 0, 6], [0, 1, 3, 4, 2, 5, 6]], [np.inf] * 2, [False] * 2),
  ):
    found = router.select(run, jnp.asarray(scores), jnp.asarray(scores), top_k)
    np.testing.assert_array_equal(found.ids[:, 0], expected)
    np.testing.assert_array_equal(found.margins[:, 0], margins)
    np.testing.assert_array_equal(found.ties[:, 0], ties)
    if top_k < 7:  # the least excess is the margin
      np.testing.assert_array_equal(found.excess.min(axis=-1), found.margins)


def test_a_router_of_equal_columns_selects_the_first_experts(model):
  def equal(path, x):
    if path.endswith("router"):
      return jnp.broadcast_to(x[:, :1], x.shape)
    return jnp.zeros_like(x) if path.endswith("router_bias") else x

  trace = call(tiny.with_params(model, equal), TOKENS[:1, :7], empty(model)).trace
  at, top_k = model.top_k_layers, np.arange(model.config.top_k)
  for name in ("ids", "slots"):
    np.testing.assert_array_equal(trace[name][at], np.broadcast_to(top_k, trace[name][at].shape))
  assert trace["ties"][at].all() and (trace["margins"][at] == 0).all()
  assert (trace["weights"][at] == trace["weights"][at][..., :1]).all()
  assert not native_fork(model).trace["ties"].all()


def test_masked_experts_are_not_chosen(model):
  native, layer = native_fork(model), layer_of(model)
  ids = native.trace["ids"][layer]
  banned = ids[:, AT, 0]
  mask = np.ones((model.config.num_layers, 2, TIME, model.config.num_experts), bool)
  mask[layer, [0, 1], AT, banned] = False
  result = tiny.fork(model, expert_mask=jnp.asarray(mask))
  assert_changes_only_what_follows(model, result)
  for row in range(2):
    new = result.trace["ids"][layer, row, AT]
    assert banned[row] not in new and (np.diff(new) > 0).all()
    assert set(ids[row, AT]) - {banned[row]} < set(new)  # and one more
    # The margin is to the strongest expert left out that was allowed.
    assert result.trace["margins"][layer, row, AT] > 0


def ranked_by(model, trace, layer):
  """What experts are ranked by, and what margins are measured in: float32 [B, T, E] each."""
  logits = trace["router_logits"][layer]
  if model.config.family == "deepseek_v4":
    bias = np.asarray(model.params["params"][f"layers_{layer}"]["moe"]["router_bias"])
    return (numerics.sqrt_softplus(logits) + bias,) * 2
  scores = numerics.softmax(logits)
  return (to_bf16(scores) if model.config.family == "deepseek" else scores), logits


def test_margins_and_ties_are_of_the_last_in_and_the_first_out(model):
  trace = native_fork(model).trace
  for layer in model.top_k_layers:
    scores, measure = ranked_by(model, trace, layer)
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, trace["ids"][layer], True, -1)
    last = lambda x: np.where(chosen, x, np.inf).min(-1)
    first = lambda x: np.where(chosen, -np.inf, x).max(-1)
    assert (last(scores) >= first(scores)).all()
    assert_same_bits(trace["margins"][layer], last(measure) - first(measure))
    np.testing.assert_array_equal(trace["ties"][layer], last(scores) == first(scores))


# DeepSeek-V4's routers.


def decode_one(model, tokens=TOKENS[:1, :7]):
  """The first seven tokens from an empty state."""
  return call(model, tokens, empty(model))


def test_router_bias_selects_and_never_weighs(v4):
  shift = lambda amount: lambda path, x: x + amount if path.endswith("router_bias") else x
  native, shifted = decode_one(v4), decode_one(tiny.with_params(v4, shift(np.float32(0.25))))
  assert differences(native, shifted) == ["margins"]

  def favour(path, x):
    return x.at[7].set(100.0) if path.endswith("router_bias") else x

  trace = decode_one(tiny.with_params(v4, favour)).trace
  for layer in v4.top_k_layers:
    assert (trace["ids"][layer] == 7).any(-1).all()
    assert (native.trace["ids"][layer] != 7).all(-1).any()
    chosen = np.take_along_axis(router_scores(v4, trace, layer), trace["ids"][layer], -1)
    weights = chosen / chosen.sum(-1, keepdims=True) * v4.config.routed_scale
    np.testing.assert_allclose(trace["weights"][layer], weights, rtol=2e-6)


def test_hash_layers_take_the_row_of_the_table(v4):
  trace = decode_one(v4).trace
  assert v4.config.hash_layers == (0, 1)
  for layer in v4.config.hash_layers:
    moe = v4.params["params"][f"layers_{layer}"]["moe"]
    assert "router_bias" not in moe
    rows = np.asarray(moe["hash_table"])[TOKENS[:1, :7]]
    by_slot = np.take_along_axis(trace["ids"][layer], trace["slots"][layer], -1)
    np.testing.assert_array_equal(by_slot, rows)
    assert np.isnan(trace["margins"][layer]).all() and not trace["ties"][layer].any()


# NaN experts.


def poison(model, experts):
  """The model with NaN in the down projection of experts[layer]."""

  def change(path, x):
    layer = path.split(".")[0]
    if path.endswith("experts.down") and layer in experts:
      return x.at[np.array(experts[layer])].set(np.nan)
    return x

  return tiny.with_params(model, change)


def unchosen(model, trace, valid):
  """Which experts the valid tokens did not choose, by the name of the layer."""
  every = set(range(model.config.num_experts))
  return {
    f"layers_{i}": sorted(every - set(trace["ids"][i, :, valid].ravel().tolist()))
    for i in model.moe_layers
  }


def test_nan_in_experts_that_nobody_chose_is_not_seen(model):
  """One token, and padding that would choose others."""
  padded = np.full((1, tiny.CHUNK), -1, np.int32)
  padded[:, 0] = TOKENS[0, 0]
  native = call(model, padded, empty(model))
  left = unchosen(model, native.trace, valid=0)
  assert all(left.values())
  result = call(poison(model, left), padded, empty(model))
  assert differences(result.tokens(1), native.tokens(1)) == []
  assert (result.trace["nan_experts"] == -1).all()


def test_a_nan_expert_is_named_with_its_layer(model):
  native, layer = decode_one(model), layer_of(model)
  expert = int(native.trace["ids"][layer, 0, AT, -1])
  result = decode_one(poison(model, {f"layers_{layer}": [expert]}))
  named = result.trace["nan_experts"]
  chose = (native.trace["ids"][layer] == expert).any(-1)
  assert (named[:layer] == -1).all()
  np.testing.assert_array_equal(named[layer], np.where(chose, expert, -1))
  assert_same_bits(result.trace["ids"][layer], native.trace["ids"][layer])
  assert np.isnan(result.logits[0, AT]).all()


def test_softening_scales_weights_by_the_distance_to_the_boundary(model):
  plain = native_fork(model)
  layer = model.top_k_layers[0]  # what comes later reads another state
  margins = plain.trace["margins"]
  tau = np.quantile(margins[layer], 0.9)
  soft = tiny.fork(model, softening=jnp.full(margins.shape, tau, jnp.float32))
  ids, before = (plain.trace[name][layer] for name in ("ids", "weights"))
  assert (soft.trace["ids"][layer] == ids).all()
  scores, factors = selection_scores(model, plain, layer), np.empty(before.shape, np.float32)
  for at in np.ndindex(ids.shape[:2]):
    left_out = np.delete(scores[at], ids[at]).max()
    factors[at] = np.clip((scores[at][ids[at]] - left_out) / np.float32(tau), 0, 1)
  assert 0 < (factors < 1).mean() < 1
  assert_same_bits(soft.trace["weights"][layer], before * factors)


def selection_scores(model, run, layer):
  """What margins of a layer are measured in: logits, or DeepSeek-V4's biased scores."""
  logits = np.asarray(run.trace["router_logits"][layer], np.float32)
  if model.config.family != "deepseek_v4":
    return logits
  bias = model.params["params"][f"layers_{layer}"]["moe"]["router_bias"]
  return np.asarray(numerics.sqrt_softplus(logits)) + np.asarray(bias, np.float32)
