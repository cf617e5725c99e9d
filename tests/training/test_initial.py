"""Starting parameters: expert tables balanced by frequency, streams that keep to themselves."""

import numpy as np

from moejax.training.initial import hash_table, initial_params
from tests.models import tiny


def test_a_hash_table_is_balanced_by_how_often_tokens_occur():
  rng = np.random.default_rng(0)
  counts = (1e6 / (1 + np.arange(997)) ** 0.9).astype(int)[rng.permutation(997)]
  counts[rng.permutation(997)[:50]] = 0
  table = hash_table(counts, 16, 3, seed=1)
  assert table.shape == (997, 3) and table.dtype == np.int32
  assert all(len(set(row)) == 3 for row in table) and table.min() == 0 and table.max() == 15
  load = np.bincount(table.ravel(), weights=np.repeat(counts, 3), minlength=16)
  assert load.max() < 1.001 * load.mean()
  random = np.argsort(rng.random((997, 16)), axis=1)[:, :3]  # a table that does not look
  load = np.bincount(random.ravel(), weights=np.repeat(counts, 3), minlength=16)
  assert load.max() > 1.05 * load.mean()
  assert (hash_table(counts, 16, 3, seed=1) == table).all()
  assert (hash_table(counts, 16, 3, seed=2) != table).any()


def test_initial_parameters_of_deepseek_v4():
  config = tiny.tiny("deepseek_v4").config
  counts = np.arange(config.vocab_size)
  params = initial_params(config, counts, seed=4)["params"]
  for layer in config.hash_layers:
    expected = hash_table(counts, config.num_experts, config.top_k, 4 + layer)
    assert (np.asarray(params[f"layers_{layer}"]["moe"]["hash_table"]) == expected).all()
  base = np.asarray(params["layers_0"]["ffn_hc"]["base"])
  mixing = base[2 * config.hc_mult :].reshape(config.hc_mult, config.hc_mult)
  assert (base[: 2 * config.hc_mult] == 0).all() and (np.diag(mixing) > 0).all()
  assert (mixing - np.diag(np.diag(mixing)) == 0).all()
