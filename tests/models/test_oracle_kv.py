"""Canonical runs of the K/V families against `oracle_kv`, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import checkpoints
from moejax.models import Mode, Taps
from tests.models.oracle_kv import Decoder
from tests.oracles import assert_same_bits
from tests.references import weights
from tests.references.cases import CASES

TOKENS, LAYERS = 12, 2

# Every family; a clip, dense layers, gates as they are or normalised, a tied table. Of DeepSeek-MoE
# the eager contract is the native one.
RUNS = [
  ("olmoe_clip", "native"),
  ("olmoe_gqa", "eager"),
  ("qwen2_moe_dense", "native"),
  ("qwen3_moe_base", "eager"),
  ("deepseek_norm", "native"),
  ("mixtral_base", "native"),
  ("mixtral_tied", "eager"),
]


@pytest.mark.parametrize(("name", "contract"), RUNS)
def test_canonical_runs_have_the_bits_of_the_oracle(name, contract, tmp_path):
  config = CASES[name].config | dict(num_hidden_layers=LAYERS)
  case = dataclasses.replace(CASES[name], config=config)
  model = checkpoints.load(weights.write_checkpoint(case, tmp_path))
  mode, taps = Mode(contract=contract), Taps(ids=True, weights=True, post_block=True)
  tokens = weights.tokens(case)[:, :TOKENS]
  state = model.init_state(*tokens.shape, mode)
  apply = jax.jit(functools.partial(model.apply, mode=mode, taps=taps))
  logits, _, trace = jax.tree.map(np.asarray, apply(model.params, jnp.asarray(tokens), state))
  tensors, layers = weights.tensors(case), weights.moe_layers(case.config)
  for row, sequence in enumerate(tokens):
    oracle = Decoder(case.config, tensors, contract)
    expected = oracle(sequence)
    np.testing.assert_array_equal(trace["ids"][layers, row], oracle.ids)
    assert_same_bits(trace["weights"][layers, row], oracle.weights)
    for layer, block in enumerate(oracle.blocks):
      assert_same_bits(trace["post_block"][layer, row], block)
    assert_same_bits(logits[row], expected)
