"""Prefill, decode, generation and scoring: how tokens are cut into calls and rows is invisible."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import checkpoints, inference
from moejax.combine import B
from moejax.inference.batches import common_prefix
from moejax.models import Execution, export, Mode, Pins, Taps
from tests.oracles import assert_same_bits
from tests.references import cases, weights

FLOAT32 = Mode("fast", "float32")
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return weights.write_checkpoint(cases.CASES["olmoe_base"], tmp_path_factory.mktemp("olmoe"))


@pytest.fixture(scope="module")
def model(directory):
  return checkpoints.load(directory)


def assert_same_state(a, b, row_a=0, row_b=0):
  a, b = export(a, row_a), export(b, row_b)
  assert a.keys() == b.keys()
  for name in a:
    assert_same_bits(a[name], b[name])


def test_prompts_of_any_length_in_chunks_of_any_size(model):
  whole, whole_state, trace = inference.prefill(model, PROMPTS, 16, taps=Taps(ids=True))
  chunked, state, chunk_trace = inference.prefill(model, PROMPTS, 16, chunk=3, taps=Taps(ids=True))
  assert_same_bits(whole, chunked)
  for row, prompt in enumerate(PROMPTS):
    assert int(state.position[row]) == len(prompt)
    assert_same_state(state, whole_state, row, row)
    alone, one_state, _ = inference.prefill(model, [prompt], 16)
    assert_same_bits(whole[row], alone[0])
    assert_same_state(state, one_state, row, 0)
  width = chunk_trace["ids"].shape[2]
  assert (np.asarray(trace["ids"])[:, :, :width] == np.asarray(chunk_trace["ids"])).all()
  assert (np.asarray(trace["ids"])[:, 1, 4:] == -1).all()


def test_decode_goes_on_from_a_state_that_stays(model):
  _, state, _ = inference.prefill(model, [[1, 2, 3]], 16)
  logits, after, _ = inference.decode(model, [4], state)
  again, _, _ = inference.decode(model, [4], state)
  whole, whole_state, _ = inference.prefill(model, [[1, 2, 3, 4]], 16)
  assert_same_bits(logits, again)
  assert_same_bits(logits, whole)
  assert_same_state(after, whole_state)


def test_generation_is_that_of_transformers(directory):
  model, reference = checkpoints.load(directory, "float32"), cases.reference("olmoe_base")
  case = cases.CASES["olmoe_base"]
  prompts = reference["tokens"][:, : case.prompt].tolist()
  generation = inference.generate(model, prompts, case.new, mode=FLOAT32)
  assert (generation.tokens == reference["greedy_ids"]).all()
  assert not generation.ties.any()
  score = inference.score(model, reference["tokens"], mode=FLOAT32)
  # Two float32 implementations; issue of record: 1e-5.
  np.testing.assert_allclose(score.nll, reference["nll"], atol=1e-5)


def test_a_shared_prefix_is_run_once_and_changes_nothing(model):
  together = inference.generate(model, PROMPTS, 5)
  alone = [inference.generate(model, [prompt], 5) for prompt in PROMPTS]
  assert (together.tokens == np.concatenate([one.tokens for one in alone])).all()
  for row, one in enumerate(alone):
    assert_same_state(together.state, one.state, row)
  assert common_prefix(PROMPTS) == 3
  assert common_prefix([[1, 2], [1, 2]]) == 2


def test_equal_prompts_under_different_executions(model):
  """Rows of one batch may run under contracts of their own, prompt included."""
  codes = jnp.asarray([[-1], [B.code]], jnp.int32)
  both = inference.generate(model, [PROMPTS[0]] * 2, 4, Execution(codes=codes))
  native = inference.generate(model, [PROMPTS[0]], 4)
  changed = inference.generate(model, [PROMPTS[0]], 4, Execution(codes=jnp.full((1, 1, 1), B.code)))
  assert_same_state(both.state, native.state, 0)
  assert_same_state(both.state, changed.state, 1)
  keys = [export(both.state, row)["layers.2.keys"] for row in (0, 1)]
  assert (keys[0] != keys[1]).any()


def test_a_tied_argmax_takes_the_lowest_id_and_is_recorded():
  logits = jnp.asarray([[0.0, 3.0, 1.0, 3.0], [2.0, 1.0, 0.0, -1.0]])
  token, tie = inference.greedy(logits)
  assert token.tolist() == [1, 0]
  assert tie.tolist() == [True, False]


def test_ties_are_recorded_at_every_step(model):
  head = jnp.zeros_like(model.params["params"]["head"])
  tied = dataclasses.replace(model, params={"params": {**model.params["params"], "head": head}})
  generation = inference.generate(tied, [[1, 2]], 3)
  assert generation.tokens.tolist() == [[0, 0, 0]]
  assert generation.ties.all()


def test_score_is_decoding_token_by_token(model):
  tokens = cases.reference("olmoe_base")["tokens"][:, :13]
  whole = inference.score(model, tokens, prefill=4)
  assert whole.nll.shape == (2, 9)
  for chunk in (1, 4):
    assert_same_bits(inference.score(model, tokens, prefill=4, chunk=chunk).nll, whole.nll)
  state = model.module.init_state(2, 64)
  logits, _, _ = inference.forward(model, tokens[:, :-1], state)
  x = np.asarray(logits, np.float64)[:, 3:]
  exact = np.log(np.exp(x).sum(axis=-1)) - np.take_along_axis(x, tokens[:, 4:, None], -1)[..., 0]
  # Rounding of a float32 log-sum-exp near 5 nats.
  np.testing.assert_allclose(whole.nll, exact, atol=5e-6)


def test_padding_has_no_loss_and_changes_no_other(model):
  tokens = np.array(cases.reference("olmoe_base")["tokens"][:2, :9])
  whole = inference.score(model, tokens).nll
  tokens[1, 5:] = -1
  padded = inference.score(model, tokens).nll
  assert_same_bits(padded[0], whole[0])
  assert_same_bits(padded[1], np.where(np.arange(8) < 4, whole[1], np.float32(0)))


def test_a_traced_route_pins_a_run_in_chunks(model):
  tokens = cases.reference("olmoe_base")["tokens"][:, :9]
  taps = Taps(ids=True, weights=True, slots=True)
  clean = inference.score(model, tokens, taps=taps)
  two_bits = Execution(kv_bits=jnp.int32(2))
  pins = two_bits.replace(pins=Pins.from_trace(clean.trace))
  free = inference.score(model, tokens, execution=two_bits, taps=taps)
  pinned = inference.score(model, tokens, execution=pins, taps=taps, chunk=4)
  assert (np.asarray(free.trace["ids"]) != np.asarray(clean.trace["ids"])).any()
  assert (np.asarray(pinned.trace["ids"]) == np.asarray(clean.trace["ids"])).all()
  assert_same_bits(pinned.trace["weights"], clean.trace["weights"])


def test_a_nan_is_named(model):
  params = jax.tree.map(lambda x: x, model.params)
  _, _, trace = inference.prefill(model, [[1, 2, 3]], 8, taps=Taps(ids=True))
  chosen = int(trace["ids"][1, 0, 2, 0])
  experts = params["params"]["layers_1"]["moe"]["experts"]
  experts["down"] = experts["down"].at[chosen, 0, 0].set(jnp.nan)
  broken = dataclasses.replace(model, params=params)
  with pytest.raises(FloatingPointError, match=rf"layer 1, row 0, position \d: expert {chosen} "):
    inference.prefill(broken, [[1, 2, 3]], 8)
  with pytest.raises(FloatingPointError, match=f"expert {chosen} gave a NaN"):
    inference.score(broken, np.array([[1, 2, 3, 4]]))


def bad_calls(model):
  _, state, _ = inference.prefill(model, [[1, 2, 3]], 4)
  wide = Execution(codes=jnp.zeros((1, 1, 2), jnp.int32))
  prefill, score = inference.prefill, inference.score
  return {
    "token id 89 is outside the vocabulary of 89": lambda: prefill(model, [[1, 89]], 8),
    "prompt 1 is empty": lambda: prefill(model, [[1], []], 8),
    "no prompt": lambda: inference.generate(model, [], 3),
    "a prompt of 9 tokens does not fit 8 positions": lambda: prefill(model, [[1] * 9], 8),
    "5 tokens do not fit a state made for 4": lambda: inference.forward(model, [[1, 2]], state),
    "num_tokens must be at least 1, got 0": lambda: inference.emit(model, [1], state, 0),
    "4 more tokens do not fit": lambda: inference.continue_greedily(
      model, jnp.zeros((1, 89)), state, 5
    ),
    "max_new_tokens must be at least 1": lambda: inference.generate(model, [[1]], 0),
    "padding and stands at the end": lambda: inference.forward(model, [[-1, 2]], state),
    "must be integers": lambda: inference.forward(model, [[0.5]], state),
    "prefill must be within 1 .. 2": lambda: score(model, [[1, 2, 3]], prefill=3),
    "token id 90 is outside the vocabulary of 89": lambda: score(model, [[1, 2, 90]]),
    "stands at the end of a row only": lambda: score(model, [[1, -1, 2]]),
    "made for 2 tokens, run on 3": lambda: prefill(model, [[1, 2, 3]], 8, wide),
    "another config, batch or mode": lambda: inference.forward(
      model, [[1]], model.module.init_state(1, 4, FLOAT32)
    ),
    "code is outside": lambda: score(
      model, [[1, 2]], execution=Execution(codes=jnp.full((1, 1, 1), 9, jnp.int32))
    ),
  }


def test_bad_input_gets_one_clear_sentence(model):
  for sentence, call in bad_calls(model).items():
    with pytest.raises(ValueError) as error:
      call()
    assert sentence in str(error.value)
