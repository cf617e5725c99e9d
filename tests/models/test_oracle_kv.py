"""Canonical runs of the K/V families against `oracle_kv`, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import checkpoints
from moejax.models import export, Mode, Taps
from tests.models.oracle_kv import Decoder
from tests.oracles import assert_same_bits
from tests.references import weights
from tests.references.cases import CASES

TOKENS = 12

# Every family; a clip, dense layers, gates as they are or normalised, a tied table. Of DeepSeek-MoE
# the eager contract is the native one.
RUNS = [
  ("olmoe_clip", "native"),
  ("qwen2_moe_dense", "native"),
  ("qwen3_moe_base", "eager"),
  ("deepseek_norm", "native"),
  ("mixtral_base", "native"),
  ("mixtral_tied", "eager"),
]


def short(name):
  """The case with two layers and fewer tokens; Mixtral with four experts per token."""
  case = CASES[name]
  config = case.config | dict(num_hidden_layers=2)
  if case.family == "mixtral":
    config["num_experts_per_tok"] = 4
  return dataclasses.replace(case, config=config, length=TOKENS)


@pytest.mark.parametrize(("name", "contract"), RUNS)
def test_canonical_runs_have_the_bits_of_the_oracle(name, contract, tmp_path):
  case = short(name)
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path))
  # The accumulator `routed` shows the order of a sum where its rounded result does not.
  taps = Taps(ids=True, weights=True, routed=True, combined=True, post_block=True)
  mode, tokens = Mode(contract=contract), weights.tokens(case)
  state = model.init_state(*tokens.shape, mode)
  apply = jax.jit(functools.partial(model.apply, mode=mode, taps=taps))
  logits, state, trace = apply(model.params, jnp.asarray(tokens), state)
  trace = {key: np.asarray(value) for key, value in trace.items()}
  tensors, layers = weights.tensors(case), weights.moe_layers(case.config)
  for row, sequence in enumerate(tokens):
    oracle = Decoder(case.config, tensors, contract)
    expected = oracle(sequence)
    np.testing.assert_array_equal(trace["ids"][layers, row], oracle.ids)
    for key in ("weights", "routed", "combined"):
      assert_same_bits(trace[key][layers, row], getattr(oracle, key))
    for layer, block in enumerate(oracle.blocks):
      assert_same_bits(trace["post_block"][layer, row], block)
    assert_same_bits(logits[row], expected)
    for key, value in export(state, row).items():
      assert_same_bits(value, oracle.state[key])
