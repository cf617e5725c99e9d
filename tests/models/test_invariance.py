"""A token's bits do not depend on what is computed beside it, before it in the same call, or where.

BF16 weights, canonical arithmetic, all families. Everything is compared: logits, every tap, and the
exported state of every row. Capacity of a state, and lanes of executions, are in `test_execution`.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models import Mode, NATIVE, Taps
from moejax.models.execution import NOTHING
from moejax.models.run import Run
from moejax.models.sparse_state import window_and_entries
from moejax.models.state import KvCache
from tests.models import tiny
from tests.models.tiny import BATCH, call, differences, draw_tokens, LENGTH, prefilled
from tests.oracles import assert_same_bits

TOKENS = draw_tokens(BATCH)


@pytest.fixture(params=tiny.FAMILIES, scope="module")
def model(request):
  return tiny.tiny(request.param)


def empty(model, rows):
  return model.module.init_state(rows, LENGTH)


def row(i):
  return slice(i, i + 1)


def in_slow(*families):
  """Parameters: these families by default, every family in the slow suite."""
  return [
    pytest.param(family, marks=[] if family in families else pytest.mark.slow)
    for family in tiny.FAMILIES
  ]


# Chunks.


@pytest.fixture(scope="module")
def decoded(model):
  """Row 0, token by token."""
  return tiny.run(model, TOKENS[:1], 1)


def test_prefill_and_chunks_are_decoding(model, decoded):
  assert differences(prefilled(model).rows(row(0)), decoded) == []
  assert differences(tiny.run(model, TOKENS[:1], 7), decoded) == []


# Chunks of three begin and end at every place of a window of four.
@pytest.mark.parametrize("family", in_slow("deepseek_v4"))
def test_chunks_of_three_are_decoding(family):
  model = tiny.tiny(family)
  token_by_token = tiny.run(model, TOKENS[:1], 1)
  assert differences(tiny.run(model, TOKENS[:1], 3), token_by_token) == []


@pytest.mark.parametrize("family", in_slow("olmoe"))
def test_logits_of_some_tokens_are_those_of_all(family):
  model = tiny.tiny(family)
  tokens = TOKENS[:2, :7].copy()
  tokens[1, 5:] = -1
  some = lambda taps: call(model, tokens, empty(model, 2), taps=taps).logits
  every = some(NOTHING)
  assert_same_bits(some(Taps(logits=3)), every[:, 3:])
  assert_same_bits(some(Taps(logits="last")), np.stack([every[0, 6:], every[1, 4:5]]))


@pytest.mark.parametrize("model", ["olmoe", "deepseek_v4"], indirect=True, scope="module")
def test_state_fingerprints_are_of_what_is_in_use(model, decoded):
  expected = tiny.state_fingerprints(decoded.state)
  for state in (prefilled(model).state.rows(row(0)), fill_unused(decoded.state, np.nan)):
    np.testing.assert_array_equal(tiny.state_fingerprints(state), expected)
  other = tiny.state_fingerprints(prefilled(model).state.rows(row(1)))
  assert (np.asarray(other) != expected).any(axis=-1).all()


def test_eager_calls_have_the_bits_of_compiled_ones():
  model = tiny.tiny("olmoe")
  tokens, taps = jnp.asarray(TOKENS[:1, :7]), Taps(terms=True, combined=True, post_block=True)
  arguments = (model.params, tokens, empty(model, 1))
  logits, state, trace = model.module.apply(*arguments, taps=taps)
  compiled = jax.jit(lambda *a: model.module.apply(*a, taps=taps))(*arguments)
  for x, y in zip(jax.tree.leaves((logits, state, trace)), jax.tree.leaves(compiled)):
    assert_same_bits(x, y)


@pytest.mark.parametrize("rounding", ["reference", "hf"])
def test_a_block_is_closed_by_the_same_bits_outside_the_model(model, rounding):
  """From the traced parts: eager, compiled, mapped and scanned, and for the output of another."""
  mode, taps = Mode(rounding=rounding), Taps(combined=True, closing=True, post_block=True)
  trace = call(model, TOKENS[:2, :7], empty(model, 2), mode=mode, taps=taps).trace
  layer = model.moe_layers[-1]
  wanted = trace["post_block"][layer]
  closing, output = (jnp.asarray(trace[name][layer]) for name in ("closing", "combined"))
  close = lambda x, y: model.module.close_block(mode, x, y)
  assert_same_bits(close(closing, output), wanted)
  assert_same_bits(jax.jit(close)(closing, output), wanted)
  assert_same_bits(jax.jit(jax.vmap(jax.vmap(close)))(closing, output), wanted)
  scanned = jax.lax.scan(lambda _, pair: (None, close(*pair)), None, (closing, output))[1]
  assert_same_bits(scanned, wanted)
  other = np.asarray(close(closing, output[::-1]))
  assert wanted.shape[2:] == model.config.state_shape
  assert (other.view(np.uint32) != wanted.view(np.uint32)).any()


# Batch and padding.


@pytest.mark.parametrize("i", [1, 31, 63])
def test_a_row_of_many_is_the_row_alone(model, i):
  assert differences(prefilled(model).rows(row(i)), tiny.run(model, TOKENS[row(i)], 7)) == []


# Batches of two and 64 are everywhere in this folder.
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("family", in_slow("olmoe"))
def test_size_of_the_batch(family, size):
  model = tiny.tiny(family)
  together = call(model, TOKENS[:size, :7], empty(model, size))
  for i in range(size):
    apart = call(model, TOKENS[row(i), :7], empty(model, 1))
    assert differences(together.rows(row(i)), apart) == []


def test_permuted_rows_are_permuted_results(model):
  order = np.random.default_rng(2).permutation(BATCH)
  result = call(model, TOKENS[order], empty(model, BATCH))
  assert differences(result, prefilled(model).rows(order)) == []


def test_other_rows_do_not_matter(model):
  others = draw_tokens(BATCH, seed=9).copy()
  others[:20, 11:] = -1
  others[20:40] = TOKENS[0]
  others[41] = -1
  others[40] = TOKENS[40]
  result = call(model, others, empty(model, BATCH))
  assert differences(result.rows(row(40)), prefilled(model).rows(row(40))) == []


@pytest.fixture(scope="module")
def padded(model):
  """The two results of `tiny.ragged`."""
  _, (first, second) = tiny.ragged()
  one = call(model, first, empty(model, BATCH))
  return one, call(model, second, one.state)


def test_padding_is_nothing(model, padded):
  cuts, calls = tiny.ragged()
  for i, cut in enumerate(cuts):
    stops = (cut, TOKENS.shape[1] - cut)
    parts = [part.rows(row(i)).tokens(stop) for part, stop in zip(padded, stops)]
    assert differences(tiny.join(parts), prefilled(model).rows(row(i))) == []
  for tokens, part in zip(calls, padded):
    assert (part.trace["ids"][:, tokens < 0] == -1).all()


def test_state_behind_padding_is_that_of_the_tokens(model, padded):
  cuts, _ = tiny.ragged()
  state = padded[0].state
  np.testing.assert_array_equal(state.position, cuts)
  for i in np.flatnonzero((cuts > 0) & (cuts < TOKENS.shape[1]))[:4]:
    expected = tiny.run(model, TOKENS[row(i), : cuts[i]], 1).state
    assert_same_state(state.rows(row(i)), expected)
  # Nothing but padding leaves every array as it was, used or not.
  for x, y in zip(jax.tree.leaves(state.rows(row(0))), jax.tree.leaves(empty(model, 1))):
    assert_same_bits(x, y)


def assert_same_state(state, expected):
  assert state.position.tolist() == expected.position.tolist()
  a, b = tiny.export(state), tiny.export(expected)
  assert a.keys() == b.keys()
  for name, x in a.items():
    assert_same_bits(x, b[name])


# What lies in a cache unused.


def fill_unused(state, value):
  """A host state with a value in every cache entry beyond those in use."""

  def fill(x, used):
    x = np.array(x)
    for i, count in enumerate(used):
      x[i, ..., count:, :] = value
    return x

  def fill_layer(layer):
    if isinstance(layer, KvCache):
      return KvCache(fill(layer.keys, state.position), fill(layer.values, state.position))
    parts = {}
    for name in ("compressor", "indexer"):
      part = getattr(layer, name)
      if part is not None:
        entries = fill(part.entries, state.position // layer.ratio)
        parts[name] = part.replace(entries=entries)
    return layer.replace(**parts)

  return state.replace(layers=tuple(map(fill_layer, state.layers)))


def test_unused_entries_cannot_reach_a_sum(model, decoded):
  state = jax.device_get(empty(model, 1))
  filled = tiny.run(model, TOKENS[:1], 7, state, between=lambda s: fill_unused(s, np.nan))
  assert differences(filled, decoded) == []
  leaves = map(np.float32, jax.tree.leaves(filled.state))
  assert any(np.isnan(x).any() for x in leaves)  # some of the NaN is still there


# Machines.


def digests_elsewhere(*prefix, families, **environment):
  """Starts another process that prints `tiny.digest` of the families."""
  command = [*prefix, sys.executable, "-m", "tests.models.tiny", *families]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  return subprocess.Popen(command, env=os.environ | environment, **pipes)


@pytest.fixture(scope="module")
def processes():
  """Both at once, as one of them has one core only."""
  core = str(min(os.sched_getaffinity(0)))
  flags = "--xla_force_host_platform_device_count=4"
  with (
    digests_elsewhere(
      "taskset", "-c", core, families=["olmoe", "deepseek_v4"], XLA_FLAGS=flags
    ) as devices,
    digests_elsewhere(families=["deepseek_v4"], MOEJAX_NATIVE="0") as plain,
  ):
    yield dict(devices=devices, plain=plain)


@pytest.mark.parametrize("name", ["devices", "plain"])
def test_one_core_four_devices_and_plain_xla(processes, name):
  """Rows spread over four devices that share one core; the kernels that need no custom call."""
  out, error = processes[name].communicate()
  assert processes[name].returncode == 0, error
  digests = json.loads(out)
  assert digests == {family: tiny.digest(tiny.tiny(family)) for family in digests}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"MOEJAX_NATIVE": "0"}], ids=["devices", "plain"])
def test_every_family_on_one_core_and_four_devices_and_in_plain_xla(environment):
  flags = {} if environment else {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  prefix = () if environment else ("taskset", "-c", str(min(os.sched_getaffinity(0))))
  with digests_elsewhere(*prefix, families=tiny.FAMILIES, **environment, **flags) as process:
    out, error = process.communicate()
  assert process.returncode == 0, error
  assert json.loads(out) == {family: tiny.digest(tiny.tiny(family)) for family in tiny.FAMILIES}


# The ring.


@pytest.mark.parametrize("start", [0, 3, 8, 19])
def test_a_rotated_ring_reads_the_same_keys(start):
  """The compact list of each query, by age: 0 is the first token of the call."""
  window, time, entries = 8, 3, 6
  chosen = np.array([[[4, 0, 2]]], np.int32).repeat(time, axis=1)
  lists = []
  for begin in (start, start + 5):
    tokens = jnp.zeros((1, time), jnp.int32)
    run = Run(Mode(), Taps(), NATIVE, tokens, jnp.full(1, begin, jnp.int32), 64)
    ages = np.full(window, -99)
    for position in range(begin - window, begin):
      ages[position % window] = position - begin
    ring, new = jnp.zeros((1, window, 1)), jnp.zeros((1, time, 1))
    index, count = window_and_entries(run, ring, new, jnp.full((1, time), 2, jnp.int32), chosen)
    source = np.concatenate([ages, np.arange(time), 100 + np.arange(entries)])
    lists.append([source[i[:n]].tolist() for i, n in zip(np.asarray(index[0]), count[0])])
  expected = [[*range(t - window + 1, t + 1), 104, 100] for t in range(time)]
  unfilled = [[age for age in keys if age >= -start] for keys in expected]
  assert lists[0] == unfilled
  assert lists[1] == [[age for age in keys if age >= -start - 5] for keys in expected]
  assert start < window or lists[0] == lists[1]
