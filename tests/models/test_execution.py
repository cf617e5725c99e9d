"""Executions, modes and routes: what each part changes, and that it changes nothing else.

`tiny.fork` runs two rows on from position FORK with every part of the execution present, so that
one program serves most of this file.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.combine import A, B, C, merge_shared, P32
from moejax.combine.reduce import combine_rows
from moejax.models import Delta, Execution, layers, Mode, Pins
from moejax.models.execution import DEFAULT
from tests.models import tiny
from tests.models.forks import (
  assert_changes_only_what_follows,
  AT,
  at_one,
  layer_of,
  native_rows,
  TIME,
  TOKENS,
)
from tests.models.tiny import call, differences, FORK, LENGTH, native_fork
from tests.oracles import assert_same_bits, bits


@pytest.fixture(params=tiny.FAMILIES, scope="module")
def model(request):
  return tiny.tiny(request.param)


def test_capacity_and_a_neutral_execution_do_not_matter(model):
  assert native_fork(model).state.length > LENGTH
  for i, row in enumerate(native_rows(model)):
    assert differences(native_fork(model).rows(slice(i, i + 1)), row) == []


@pytest.mark.parametrize("model", ["olmoe", "deepseek_v4"], indirect=True)
def test_lanes_of_executions_are_single_runs(model):
  """One program for every contract and order: vmap over a stack of executions."""
  codes = np.array([scheme.code for scheme in (P32, C, A, B)], np.int32)
  rng, top_k = np.random.default_rng(3), model.config.top_k
  orders = np.stack([rng.permutation(top_k) for _ in codes]).astype(np.int32)

  @jax.jit
  def lanes(params, tokens, state, executions):
    run = lambda lane: model.module.apply(params, tokens, state, lane, taps=tiny.TAPS)
    return jax.vmap(run)(executions)

  executions = Execution(codes=codes, orders=orders)
  stacked = lanes(model.params, TOKENS[:2, FORK:], tiny.before_fork(model), executions)
  stacked = jax.device_get(stacked)
  results = [tiny.Result(*jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(len(codes))]
  for result, code, order in zip(results, codes, orders):
    single = tiny.fork(model, codes=everywhere(model, code), orders=everywhere(model, order))
    assert differences(result, single) == []
  assert len({result.trace["combined"].tobytes() for result in results}) == len(codes)


def everywhere(model, value):
  """The value in every layer, row and token of a fork."""
  shape = (model.config.num_layers, 2, TIME, *np.shape(value))
  return jnp.asarray(np.broadcast_to(value, shape))


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
  execution = Execution(delta=delta, kv_bits=jnp.int32(4))
  return call(model, TOKENS[:2, FORK:], tiny.before_fork(model), execution, mode)


def test_float_delta_is_a_float32_addition_and_default_strength_is_one():
  model = tiny.tiny("olmoe")
  one = everywhere(model, ONE)
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


# Simulated quantisers.


@pytest.fixture(scope="module")
def v4():
  return tiny.tiny("deepseek_v4")


def strengths(kv, activations):
  return dict(kv_strength=jnp.asarray(kv), activation_strength=jnp.asarray(activations))


ZERO, HALF, ONE = np.float32([0, 0.5, 1])


def test_strength_zero_is_no_quantiser(model):
  none, some, full = (everywhere(model, s) for s in (ZERO, HALF, ONE))
  result = tiny.fork(model, **strengths(none, none))
  for i, row in enumerate(native_rows(model)):
    assert differences(result.rows(slice(i, i + 1)), row) == []
  for kv, activations in ((full, none), (none, full), (some, none), (none, some)):
    assert "logits" in differences(tiny.fork(model, **strengths(kv, activations)), result)


def test_strength_is_of_its_layer_and_token(model):
  """Later tokens read the quantised keys in the same layer, nothing else does."""
  native, none, layer = native_fork(model), everywhere(model, ZERO), layer_of(model)
  one = at_one(model, ONE, ZERO)
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
  native, none = tiny.contents(native_fork(v4)), np.array(everywhere(v4, ZERO))
  both = ("compressor", "indexer") if quantiser == "activation_strength" else ("compressor",)
  for token in range(TIME):
    strength = none.copy()
    strength[1, :, token] = 1
    found = tiny.contents(tiny.fork(v4, **{quantiser: jnp.asarray(strength)}))
    for name in (f"1.layers.1.{part}.entries" for part in both):
      changed = (bits(found[name]) != bits(native[name])).any(axis=-1)
      closed = np.arange(3, 4 * len(changed), 4) == FORK + token  # entry 0 at 3, and so on
      np.testing.assert_array_equal(changed, closed)
