"""DeepSeek-V4 against `oracle_v4`: in float64 within rounding errors, canonical runs bit for bit.

States are compared on both sides of every boundary: of the window, of CSA and of HCA.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import checkpoints
from moejax.models import Execution, export, Mode, NATIVE, Taps
from moejax.models.layers import rope_at
from moejax.models.run import Run
from moejax.models.sparse_attention import Indexer
from moejax.models.sparse_state import window_and_entries
from tests.models.oracle_v4 import Sequence
from tests.oracles import assert_same_bits, to_bf16
from tests.references import weights
from tests.references.cases import CASES, reference

# The accumulator `routed` shows the order of a sum where its rounded result does not.
SUMS = ("terms", "routed", "shared", "combined", "post_block")
TAPS = Taps.routes(**dict.fromkeys(SUMS, True))
EXACT, CLOSE = ("ids", "slots", "ties"), ("router_logits", "weights", "margins", *SUMS)


def wide(layer_types):
  """A case of these layers, the first hashed, with more than one quantiser group everywhere.

  2 of 128 channels in a linear, 2 of 64 in a key-value vector, 2 of 32 in the indexer. The eps are
  large enough to be missed. 22 tokens.
  """
  case = CASES["deepseek_v4_base"]
  sizes = dict(hidden_size=256, head_dim=136, index_head_dim=64, index_n_heads=8)
  sizes |= dict(rms_norm_eps=1e-3, hc_eps=1e-3)
  layers = dict(
    num_hidden_layers=len(layer_types), num_hash_layers=1, layer_types=list(layer_types)
  )
  return dataclasses.replace(case, config=case.config | sizes | layers, batch=1, length=22)


COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
EVERY_KIND, TWO_KINDS = wide(("sliding_attention", *COMPRESSED)), wide(COMPRESSED)
CSA_ONLY = wide(COMPRESSED[:1])


def run_oracle(case, tokens, **options):
  """(logits [T, V], what each step traced, the state after each step) of tokens [T]."""
  sequence = Sequence(case.config, weights.tensors(case), **options)
  steps = [(sequence.step(token), sequence.state()) for token in tokens]
  logits, states = zip(*steps)
  return np.stack(logits), sequence.trace, states


def stacked(trace, name):
  """An entry of an oracle's trace, [L, T, ...]."""
  return np.stack([[layer[name] for layer in step] for step in trace], axis=1)


def run_model(model, tokens, chunk, mode, execution=NATIVE):
  """The model on tokens [B, T], chunk by chunk, the last one padded.

  Returns:
    (logits [B, T, V], trace [L, B, T, ...], {position: state after that many tokens}).
  """
  apply = jax.jit(functools.partial(model.apply, mode=mode, taps=TAPS))
  state = model.init_state(*tokens.shape, mode)
  states, pieces = {}, []
  for at in range(0, tokens.shape[1], chunk):
    piece = tokens[:, at : at + chunk]
    width = piece.shape[1]
    padded = np.pad(piece, ((0, 0), (0, chunk - width)), constant_values=-1)
    logits, state, trace = apply(model.params, jnp.asarray(padded), state, execution)
    states[at + width] = state
    trace = {name: np.asarray(value)[:, :, :width] for name, value in trace.items()}
    pieces.append((np.asarray(logits)[:, :width], trace))
  traces = [trace for _, trace in pieces]
  joined = {name: np.concatenate([t[name] for t in traces], axis=2) for name in traces[0]}
  return np.concatenate([logits for logits, _ in pieces], axis=1), joined, states


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].family == "deepseek_v4"])
def test_transformers_is_near_the_oracle(name):
  case, recorded = CASES[name], reference(name)
  for row, tokens in enumerate(recorded["tokens"]):
    logits, trace, _ = run_oracle(case, tokens)
    np.testing.assert_allclose(recorded["logits"][row], logits, atol=1e-5)
    np.testing.assert_array_equal(recorded["ids"][:, row], stacked(trace, "ids"))
    np.testing.assert_allclose(recorded["weights"][:, row], stacked(trace, "weights"), atol=1e-5)
    last = stacked(trace, "post_block")[-1]
    np.testing.assert_allclose(recorded["post_block"][row], last, rtol=1e-6, atol=2e-5)
    for t, step in enumerate(trace):
      picks = [layer["picks"] for layer in step if "picks" in layer]
      recorded_picks = [[i for i in ids if i >= 0] for ids in recorded["index_ids"][:, row, t]]
      assert [sorted(ids) for ids in picks] == recorded_picks


@pytest.mark.parametrize(
  ("name", "num_layers"), [("deepseek_v4_base", 6), ("deepseek_v4_keep_all", 4)]
)
def test_float32_steps_are_near_the_oracle(name, num_layers, tmp_path):
  config = CASES[name].config | dict(num_hidden_layers=num_layers)
  case = dataclasses.replace(CASES[name], config=config)
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path), "float32")
  tokens = weights.tokens(case)
  logits, trace, states = run_model(model, tokens, 1, Mode("fast", "float32"))
  for row, sequence in enumerate(tokens):
    expected, oracle, expected_states = run_oracle(case, sequence)
    np.testing.assert_allclose(logits[row], expected, atol=1e-5)
    for field in EXACT:
      np.testing.assert_array_equal(trace[field][:, row], stacked(oracle, field))
    for field in CLOSE:
      want = stacked(oracle, field)
      np.testing.assert_allclose(trace[field][:, row], want, rtol=1e-6, atol=2e-5, err_msg=field)
    for position, want in enumerate(expected_states, start=1):
      assert_state_is_near(export(states[position], row), want)


def assert_state_is_near(ours, expected):
  """Stale rows and -inf included, in the same order."""
  assert list(ours) == list(expected)
  for name, want in expected.items():
    np.testing.assert_allclose(ours[name], want, rtol=1e-6, atol=1e-5, err_msg=name)


def assert_same_run(case, tokens, run, row=0, **options):
  """A row of `run_model` has every bit of the oracle, at every position that a chunk ends at."""
  logits, trace, states = run
  expected, oracle, expected_states = run_oracle(case, tokens, **options)
  for field in EXACT:
    np.testing.assert_array_equal(trace[field][:, row], stacked(oracle, field))
  for layer in range(case.config["num_hidden_layers"]):
    for field in CLOSE:
      assert_same_bits(trace[field][layer, row], stacked(oracle, field)[layer])
  assert_same_bits(logits[row], expected)
  for position, state in states.items():
    ours, want = export(state, row), expected_states[position - 1]
    assert list(ours) == list(want)
    for name, value in want.items():
      assert_same_bits(ours[name], value)


@pytest.mark.parametrize(
  ("case", "rounding", "chunk"),
  [(EVERY_KIND, "reference", 7), (TWO_KINDS, "hf", 1)],
  ids=["reference", "hf"],
)
def test_canonical_runs_have_the_bits_of_the_oracle(case, rounding, chunk, tmp_path):
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path))
  tokens = weights.tokens(case)
  run = run_model(model, tokens, chunk, Mode(rounding=rounding))
  assert_same_run(case, tokens[0], run, rounding=rounding)


def spread(tensors):
  """With half of the channels behind a norm so small that a scale they share would lose them.

  But for the indexer's norm, whose channels a Hadamard transform mixes.
  """

  def scaled(name, value):
    if "norm.weight" not in name or "indexer" in name:
      return value
    small = np.arange(len(value)) < len(value) // 2
    return value * np.where(small, np.float32(2**-12), 1)

  return {name: scaled(name, value) for name, value in tensors.items()}


def test_quantised_canonical_runs_have_the_bits_of_the_oracle(tmp_path, monkeypatch):
  plain, case = weights.tensors, CSA_ONLY
  monkeypatch.setattr(weights, "tensors", lambda case: spread(plain(case)))
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path))
  tokens = np.tile(weights.tokens(case), (2, 1))
  # One program for both: the first row's key-value vectors are not quantised to the 4-bit grid.
  execution = Execution(kv_bits=jnp.array([[0], [4]], jnp.int32))
  run = run_model(model, tokens, 1, Mode(activations="qdq"), execution)
  assert_same_run(case, tokens[0], run, row=0, rounding="reference", qdq=True)
  assert_same_run(case, tokens[0], run, row=1, rounding="reference", qdq=True, kv_bits=4)


def test_a_query_reads_the_window_oldest_first_and_then_its_entries():
  size, start, length, visible = 8, (0, 3, 9, 16), 6, 4
  rng = np.random.default_rng(0)
  chosen = np.stack([rng.permutation(10)[:5] for _ in range(4 * length)]).reshape(4, length, 5)
  tokens, begin = jnp.zeros((4, length), jnp.int32), jnp.array(start, jnp.int32)
  run = Run(Mode(), Taps(), NATIVE, tokens, begin, 32)
  arrays = (jnp.zeros((4, size, 2)), jnp.zeros((4, length, 2)))
  counts = jnp.full((4, length), visible, jnp.int32)
  index, lengths = window_and_entries(run, *arrays, counts, jnp.asarray(chosen, jnp.int32))
  for row, first in enumerate(start):
    for t in range(length):
      positions = range(max(0, first + t + 1 - size), first + t + 1)
      want = [size + p - first if p >= first else p % size for p in positions]
      want += [size + length + entry for entry in chosen[row, t, :visible]]
      assert index[row, t, : lengths[row, t]].tolist() == want


@pytest.mark.parametrize("rounding", ["reference", "hf"])
def test_an_indexer_ranks_as_the_oracle(rounding, tmp_path):
  """32 entries and all of them chosen, so that scores which BF16 cannot tell apart are common."""
  case = dataclasses.replace(CSA_ONLY, config=CSA_ONLY.config | dict(index_topk=32))
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path))
  mode, ratio, length = Mode(rounding=rounding), 4, 128
  rng = np.random.default_rng(0)
  x, q_rank = (to_bf16(rng.standard_normal((1, length, width))) for width in (256, 16))

  def rank(params):
    state = model.init_state(1, length, mode)
    tokens = jnp.zeros((1, length), jnp.int32)
    run = Run(mode, Taps(), NATIVE, tokens, state.position, length)
    rope_of = lambda positions: rope_at(model.config.frequencies(0), length, positions)
    inputs = (run, jnp.asarray(x), jnp.asarray(q_rank), state.layers[0].indexer)
    indexer = Indexer(model.config, ratio)
    return indexer.apply({"params": params}, *inputs, rope_of(run.positions), rope_of)[0]

  chosen = np.asarray(jax.jit(rank)(model.params["params"]["layers_0"]["attention"]["indexer"]))
  oracle = Sequence(case.config, weights.tensors(case), rounding)
  index = oracle.indexers[0]
  for t in range(length):
    oracle.compress(0, "indexer.compressor.", index, x[0, t], oracle.index_form)
    picks = oracle.pick(0, x[0, t], q_rank[0, t], index.entries)
    np.testing.assert_array_equal(chosen[0, t, : len(picks)], picks)
    oracle.position += 1
