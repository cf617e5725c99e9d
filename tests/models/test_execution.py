"""Executions, modes and routes: what each part changes, and that it changes nothing else.

`tiny.fork` runs two rows on from position FORK with every part of the execution present, so that
one program serves most of this file.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import numerics
from moejax.combine import A, B, C, merge_shared, P32
from moejax.combine.reduce import combine_rows
from moejax.models import config_from_hf, Delta, Execution, layers, Mode, NATIVE, Pins, router, Taps
from moejax.models.arithmetic import Canonical
from moejax.models.execution import DEFAULT
from tests.models import tiny
from tests.models.tiny import BATCH, call, differences, draw_tokens, FORK, LENGTH, native_fork
from tests.oracles import assert_same_bits, bits, to_bf16

TOKENS = draw_tokens(BATCH)
TIME = TOKENS.shape[1] - FORK
AT = 3  # the token of a fork that is changed


@pytest.fixture(params=tiny.FAMILIES, scope="module")
def model(request):
  return tiny.tiny(request.param)


def layer_of(model):
  """The first layer whose router decides; in three families others follow."""
  return model.top_k_layers[0]


def at_one(model, value, rest):
  """`value` at layer `layer_of`, token AT of both rows, `rest` everywhere else."""
  shape = (model.config.num_layers, 2, TIME, *np.shape(value))
  out = np.broadcast_to(np.asarray(rest, np.asarray(value).dtype), shape).copy()
  out[layer_of(model), :, AT] = value
  return jnp.asarray(out)


def out_of_reach(model, x):
  """The values of [L, B, T, ...] that a change at `at_one` cannot reach."""
  layer = layer_of(model)
  after = x[layer + 1 :, :, :AT]
  return np.concatenate([part.ravel() for part in (x[:layer], np.delete(x[layer], AT, 1), after)])


def assert_changes_only_what_follows(model, result, native=None):
  """Against another run of the same tokens, the native one by default."""
  native = native or native_fork(model)
  for name in ("post_block", "ids", "terms"):
    kept, expected = (out_of_reach(model, r.trace[name]) for r in (result, native))
    assert_same_bits(kept, expected)
  assert_same_bits(result.logits[:, :AT], native.logits[:, :AT])
  for row in range(2):
    here = (layer_of(model), row, AT)
    assert (bits(result.trace["post_block"][here]) != bits(native.trace["post_block"][here])).any()
    assert (bits(result.logits[row, AT]) != bits(native.logits[row, AT])).any()
  # The layers up to the changed one keep their state; a cache is written before experts are summed.
  new, old = tiny.contents(result), tiny.contents(native)
  kept = [f"{row}.layers.{i}." for row in range(2) for i in range(layer_of(model) + 1)]
  for name in new:
    if name.startswith(tuple(kept)):
      assert_same_bits(new[name], old[name])


# Pins.


def test_a_run_pinned_to_itself_changes_no_bit(model):
  native = native_fork(model)
  pins = Pins.from_trace(native.trace, mask=np.ones((model.config.num_layers, 2, TIME), bool))
  assert differences(tiny.fork(model, pins=pins), native) == []


def other_route(model):
  """The routes of the other row and other weights, as pins that are masked to one place."""
  trace = native_fork(model).trace
  flipped = {name: trace[name][:, ::-1] for name in ("ids", "weights", "slots")}
  flipped["weights"] = flipped["weights"] * np.float32(1.0009765625)  # not BF16, not normalised
  return Pins.from_trace(flipped, mask=at_one(model, True, False))


def test_pins_act_where_the_mask_is_true(model):
  pins = other_route(model)
  unmasked = pins.replace(mask=jnp.zeros_like(pins.mask))
  assert differences(tiny.fork(model, pins=unmasked), native_fork(model)) == []
  result = tiny.fork(model, pins=pins)
  assert_changes_only_what_follows(model, result)
  here = (layer_of(model), slice(None), AT)
  for name in ("ids", "weights", "slots"):
    assert_same_bits(result.trace[name][here], getattr(pins, name)[here])
  # Logits, margins and ties are still the router's own.
  for name in ("router_logits", "margins", "ties"):
    assert_same_bits(result.trace[name][here], native_fork(model).trace[name][here])


def test_pinned_weights_are_used_verbatim(model):
  """Doubled weights double every bit pattern of a term: nothing normalises them again."""
  native = native_fork(model)
  pins = Pins.from_trace(native.trace, mask=at_one(model, True, False))
  result = tiny.fork(model, pins=pins.replace(weights=2 * pins.weights))
  here = (layer_of(model), slice(None), AT)
  assert_same_bits(result.trace["terms"][here], 2 * native.trace["terms"][here])


# Contracts and orders.


@pytest.mark.parametrize("code", [P32.code, A.code])
def test_a_contract_at_one_token_changes_only_what_follows(model, code):
  if code == model.module.contract(DEFAULT).code:
    code = C.code
  assert_changes_only_what_follows(model, tiny.fork(model, codes=at_one(model, code, -1)))


def native_orders(model, result, contract):
  """int32 [L, B, T, K], said once more: slots, or ascending ids."""
  slots = result.trace["slots"]
  if contract.order == "slot":
    return slots
  return np.broadcast_to(np.arange(slots.shape[-1], dtype=np.int32), slots.shape)


def test_identity_contract_and_order(model):
  native, contract = native_fork(model), model.module.contract(DEFAULT)
  orders = native_orders(model, native, contract)
  codes = jnp.full(orders.shape[:-1], contract.code, jnp.int32)
  for parts in (dict(codes=codes), dict(orders=orders), dict(codes=codes, orders=orders)):
    assert differences(tiny.fork(model, **parts), native) == []


def test_first_two_commute_under_b_and_not_under_a(model):
  order = np.arange(model.config.top_k, dtype=np.int32)
  swapped = order[[1, 0, *order[2:]]]
  for scheme, commutes in ((P32, True), (C, True), (B, True), (A, False)):
    codes = at_one(model, scheme.code, -1)
    one, other = (
      tiny.fork(model, codes=codes, orders=at_one(model, o, -1)) for o in (order, swapped)
    )
    assert (differences(one, other) == []) == commutes
  reverse = tiny.fork(model, codes=codes, orders=at_one(model, order[::-1], -1))
  assert differences(reverse, one)


def replay(model, result, contract):
  """The combine of every MoE layer again, from what was traced."""
  layers, trace = model.moe_layers, result.trace
  terms = jnp.asarray(trace["terms"][layers])
  codes = jnp.full(terms.shape[:3], contract.code, jnp.int32)
  orders = native_orders(model, result, contract)[layers]
  routed = combine_rows(terms, jnp.asarray(orders), codes)
  assert_same_bits(trace["routed"][layers], routed)
  shared = trace["shared"][layers] if "shared" in trace else None
  assert (shared is None) == (model.config.shared_size == 0)
  assert_same_bits(trace["combined"][layers], merge_shared(routed, shared, contract))


def test_native_combine_replayed(model):
  replay(model, native_fork(model), model.module.contract(DEFAULT))


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_eager_combine_replayed(family):
  model, mode = tiny.tiny(family), Mode(contract="eager")
  result = tiny.run(model, TOKENS[:1, :7], 7, mode=mode)
  replay(model, result, model.module.contract(mode))
  native = tiny.run(model, TOKENS[:1, :7], 7)
  assert "combined" in differences(result, native)


# Deltas.


def change_at_one(model):
  """A run whose post-block state differs first at `layer_of`, token AT."""
  code = A.code if model.module.contract(DEFAULT).code == C.code else P32.code
  return tiny.fork(model, codes=at_one(model, code, -1))


def test_xor_delta_turns_one_run_into_another(model):
  native, other = native_fork(model), change_at_one(model)
  here = (layer_of(model), slice(None), AT)
  value = bits(native.trace["post_block"][here]) ^ bits(other.trace["post_block"][here])
  delta = Delta(jnp.int32(here[0]), jnp.int32(FORK + AT), jnp.asarray(value))
  result = tiny.fork(model, delta=delta)
  # Only the sum itself was another one; all that follows is the same, the state included.
  assert set(differences(result, other)) <= {"routed", "combined"}
  for name in ("routed", "combined"):
    assert_same_bits(result.trace[name][here], native.trace[name][here])
  # Another position, or a layer that is not there, is no change.
  for elsewhere in (dict(position=jnp.int32(FORK - 1)), dict(layer=jnp.int32(-1))):
    assert differences(tiny.fork(model, delta=delta.replace(**elsewhere)), native) == []


def float_fork(model, value):
  """A fork with a float32 delta at `layer_of`, token AT, and no word about quantisers."""
  delta = Delta(jnp.int32(layer_of(model)), jnp.int32(FORK + AT), jnp.asarray(value))
  mode = tiny.quantised_mode(model)
  return call(model, TOKENS[:2, FORK:], tiny.before_fork(model), Execution(delta=delta), mode)


def test_float_delta_is_a_float32_addition_and_default_strength_is_one():
  model = tiny.tiny("olmoe")
  one = everywhere(model, 1)
  quantised = tiny.fork(model, **strengths(one, one))
  value = np.random.default_rng(4).standard_normal((2, model.config.hidden_size)).astype(np.float32)
  assert differences(float_fork(model, np.full_like(value, -0.0)), quantised) == []
  result = float_fork(model, value)
  assert_changes_only_what_follows(model, result, quantised)
  here = (layer_of(model), slice(None), AT)
  post_block = quantised.trace["post_block"][here]
  assert_same_bits(result.trace["post_block"][here], post_block + value)


def test_deltas_of_streams_and_of_signed_zeros():
  positions = jnp.array([[5, 6], [7, 8]], jnp.int32)
  x = jnp.asarray(np.array([-0.0, 0.0, 1.5, np.inf], np.float32))
  x = jnp.broadcast_to(x, (2, 2, 3, 4))

  def changed(value, layer=2, position=6):
    delta = Delta(jnp.int32(layer), jnp.int32(position), jnp.asarray(value))
    run = types.SimpleNamespace(execution=Execution(delta=delta), positions=positions)
    return np.array(layers.stream_delta(run, x, 2))

  assert_same_bits(changed(np.full((3, 4), -0.0, np.float32)), x)
  assert_same_bits(changed(np.zeros((2, 3, 4), np.uint32)), x)
  plus = changed(np.ones((3, 4), np.float32))
  assert_same_bits(plus[0, 1], np.asarray(x[0, 1]) + np.float32(1))
  plus[0, 1] = x[0, 1]
  assert_same_bits(plus, x)
  signs = changed(np.full((2, 3, 4), 0x80000000, np.uint32), position=7)
  assert_same_bits(signs[1, 0], -np.asarray(x[1, 0]))
  assert_same_bits(changed(np.ones((3, 4), np.float32), layer=1), x)


# Routes.


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
    ids, margin, tie = router.select(run, jnp.asarray(scores), jnp.asarray(scores), top_k)
    np.testing.assert_array_equal(ids[:, 0], expected)
    np.testing.assert_array_equal(margin[:, 0], margins)
    np.testing.assert_array_equal(tie[:, 0], ties)


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


def empty(model, rows=1, mode=DEFAULT):
  return model.module.init_state(rows, LENGTH, mode)


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


@pytest.fixture(scope="module")
def v4():
  return tiny.tiny("deepseek_v4")


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


def unchosen(model, trace, valid=slice(None)):
  """Which experts no token chose, by the name of the layer."""
  every = set(range(model.config.num_experts))
  return {
    f"layers_{i}": sorted(every - set(trace["ids"][i, :, valid].ravel().tolist()))
    for i in model.moe_layers
  }


def test_nan_in_experts_that_nobody_chose_is_not_seen(model):
  """A decode step, and a call whose padding would choose others."""
  step = call(model, TOKENS[:1, :1], empty(model))
  left = unchosen(model, step.trace)
  assert all(left.values())
  assert differences(call(poison(model, left), TOKENS[:1, :1], empty(model)), step) == []
  padded = np.full((1, 7), -1, np.int32)
  padded[:, 0] = TOKENS[0, 0]
  behind = call(poison(model, left), padded, empty(model))
  assert differences(behind.tokens(1), step) == []
  assert (behind.trace["nan_experts"] == -1).all()


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


# Simulated quantisers.


def strengths(kv, activations):
  return dict(kv_strength=jnp.asarray(kv), activation_strength=jnp.asarray(activations))


def everywhere(model, strength):
  """The strength as an array of a fork."""
  return np.full((model.config.num_layers, 2, TIME), strength, np.float32)


def test_strength_zero_is_no_quantiser(model):
  native = tiny.prefilled(model).rows(slice(2)).tokens(None, start=FORK)
  none, some, all_ = (everywhere(model, s) for s in (0, 0.5, 1))
  assert differences(tiny.fork(model, **strengths(none, none)), native) == []
  for kv, activations in ((all_, none), (none, all_), (some, none), (none, some)):
    assert "logits" in differences(tiny.fork(model, **strengths(kv, activations)), native)


def test_strength_is_of_its_layer_and_token(model):
  """Later tokens read the quantised keys in the same layer, nothing else does."""
  native, none, layer = native_fork(model), everywhere(model, 0), layer_of(model)
  one = at_one(model, np.float32(1), 0)
  for kv, activations in ((one, none), (none, one)):
    result = tiny.fork(model, **strengths(kv, activations))
    post_block, was = result.trace["post_block"], native.trace["post_block"]
    assert_same_bits(post_block[:layer], was[:layer])
    assert_same_bits(post_block[layer:, :, :AT], was[layer:, :, :AT])
    assert (bits(post_block[layer, :, AT]) != bits(was[layer, :, AT])).any()
    assert_same_bits(result.logits[:, :AT], native.logits[:, :AT])


@pytest.mark.parametrize("quantiser", ["kv_strength", "activation_strength"])
def test_entries_take_the_strength_of_the_token_that_closes_them(v4, quantiser):
  """Quantised in one CSA layer at one token: what that layer reads is as it was."""
  native, none = tiny.contents(native_fork(v4)), everywhere(v4, 0)
  both = ("compressor", "indexer") if quantiser == "activation_strength" else ("compressor",)
  for token in range(TIME):
    strength = none.copy()
    strength[1, :, token] = 1
    found = tiny.contents(tiny.fork(v4, **{quantiser: jnp.asarray(strength)}))
    for name in (f"1.layers.1.{part}.entries" for part in both):
      changed = (bits(found[name]) != bits(native[name])).any(axis=-1)
      closed = np.arange(3, 4 * len(changed), 4) == FORK + token  # entry 0 at 3, and so on
      np.testing.assert_array_equal(changed, closed)


# Bad input.


def apply(model, tokens=TOKENS[:1, :2], state=None, execution=NATIVE, mode=DEFAULT):
  state = empty(model) if state is None else state
  return jax.eval_shape(
    lambda: model.module.apply(model.params, jnp.asarray(tokens), state, execution, mode=mode)
  )


def test_state_of_another_config_batch_or_mode(model):
  mode = Mode("fast", "float32")
  narrow = dataclasses.replace(model.config, head_dim=model.config.head_dim * 2)
  fewer = empty(model).replace(layers=empty(model).layers[:1])
  for state, detail in (
    (empty(model, rows=3), r"int32 \(3,\) where int32 \(1,\) is expected"),
    (empty(model, mode=mode), "float32 .* where bfloat16"),
    (type(model.module)(narrow).init_state(1, LENGTH), "bfloat16 .* where bfloat16"),
    (fewer, "other layers"),
  ):
    with pytest.raises(ValueError, match="the state is of another config.*" + detail):
      apply(model, state=state)


@pytest.mark.parametrize(
  "tokens", [TOKENS[0, :2], TOKENS[:1, :2].astype(np.float32), TOKENS[:1, :0], TOKENS[:1, :2] > 3]
)
def test_tokens_of_another_rank_or_dtype(tokens):
  with pytest.raises(ValueError, match=r"tokens must be int32 \[B, T\], T ≥ 1, got"):
    apply(tiny.tiny("olmoe"), tokens)


def test_modes_that_a_family_does_not_have(v4):
  with pytest.raises(ValueError, match="activations 'qdq' is not a rule of olmoe"):
    apply(tiny.tiny("olmoe"), mode=Mode(activations="qdq"))
  with pytest.raises(ValueError, match="the eager contract is transformers'"):
    apply(v4, mode=Mode(contract="eager"))


@pytest.mark.parametrize(
  "field, value",
  [
    ("arithmetic", "quick"),
    ("rounding", "none"),
    ("contract", "B"),
    ("kv_bits", 9),
    ("activations", "fp8"),
    ("router_dtype", "float16"),
  ],
)
def test_unknown_mode(field, value):
  with pytest.raises(ValueError, match=rf"mode: {field} must be one of .*, got {value!r}\."):
    Mode(**{field: value})


def test_other_records_that_make_no_sense():
  with pytest.raises(ValueError, match="float32 rounding needs fast arithmetic"):
    Mode(rounding="float32")
  with pytest.raises(ValueError, match='logits must be "all" or "last"'):
    Taps(logits="none")
  with pytest.raises(ValueError, match=r"batch and length must be at least 1, got 0, 3"):
    tiny.tiny("olmoe").module.init_state(0, 3)
  with pytest.raises(TypeError, match="execution: expected int32, got float32"):
    apply(tiny.tiny("olmoe"), execution=Execution(codes=jnp.zeros(1)))


def test_execution_check():
  check = lambda **parts: Execution(**parts).check(top_k=3, num_experts=5)
  pins = lambda ids: Pins(jnp.int32(ids), jnp.ones(3), jnp.arange(3), jnp.bool_(True))
  mask = np.array([True, True, False, False, False])
  for parts, message in (
    (dict(codes=np.int32([6])), r"a contract code is outside -1 \.\. 5"),
    (dict(codes=np.int32([-2])), r"a contract code is outside -1 \.\. 5"),
    (dict(orders=np.int32([[0, 1, 1]])), r"an order is not a permutation of 0 \.\. 2"),
    (dict(pins=pins([0, 1, 5])), r"a pinned id is outside 0 \.\. 4"),
    (dict(expert_mask=mask), "expert_mask leaves 2 experts, fewer than 3"),
  ):
    with pytest.raises(ValueError, match=message):
      check(**parts)
  check(
    codes=np.int32([-1, 5]),
    orders=np.int32([[2, 0, 1], [-1, -1, -1]]),
    pins=pins([-1, 0, 4]),
    expert_mask=~mask,
  )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_configs_that_are_refused(family):
  fields = tiny.FIELDS[family]
  for name in ("hidden_size", "num_experts_per_tok", "max_position_embeddings"):
    with pytest.raises(ValueError, match=rf"config\.json: field {name} is missing"):
      config_from_hf({key: value for key, value in fields.items() if key != name})
  for change, message in (
    (dict(model_type="mamba"), "unknown model_type 'mamba', expected one of deepseek, "),
    (dict(num_experts_per_tok=99), r"top_k 99 is not within 1 \.\. "),
    (dict(num_hidden_layers=0), "num_layers must be at least 1"),
    (dict(num_attention_heads=3, num_key_value_heads=2), "3 query heads are not a multiple of 2"),
  ):
    with pytest.raises(ValueError, match=message):
      config_from_hf(fields | change)


def test_values_that_this_code_does_not_compute():
  for family, change, message in (
    ("olmoe", dict(attention_bias=True), "attention_bias = True is not supported, expected False"),
    ("olmoe", dict(rope_scaling=dict(type="linear", factor=2)), "rope_type 'linear'"),
    ("qwen3_moe", dict(use_sliding_window=True), "use_sliding_window is not supported"),
    ("mixtral", dict(sliding_window=8), "sliding_window = 8 is not supported, expected 256"),
    ("deepseek", dict(scoring_func="sigmoid"), "expected 'softmax'"),
    ("deepseek_v4", dict(scoring_func="softmax"), "expected 'sqrtsoftplus'"),
    ("deepseek_v4", dict(layer_types=["sliding_attention"] * 3), "3 layer types for 4 layers"),
    ("deepseek_v4", dict(layer_types=["full_attention"] * 4), "unknown layer type"),
    ("deepseek_v4", dict(layer_types=None, compress_ratios=[0, 4, 8, 4]), "0, 4 or 128, got 8"),
  ):
    with pytest.raises(ValueError, match=message):
      config_from_hf(tiny.FIELDS[family] | change)
