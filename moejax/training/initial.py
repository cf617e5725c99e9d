"""Parameters to start training from, and the expert tables of hash-routed layers."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import Config
from moejax.models.parameters import init_params

# Routers start nearly even, and every stream of a hyper-connection mostly keeps to itself.
_ROUTER_SCALE = 0.1
_STREAM_KEEPS = 2.0


def initial_params(config: Config, token_counts: np.ndarray, seed: int):
  """float32 {"params": ...} of a model to be trained.

  Args:
    config: of the model.
    token_counts: int [V], how often each token occurs in training.
    seed: of everything random.
  """
  params = init_params(config, jax.random.key(seed), "float32")["params"]
  residual = 1 / np.sqrt(2 * config.num_layers)

  def adapt(path, x):
    names = [entry.key for entry in path]
    if names[-1] in ("o", "o_b", "down"):
      return x * np.float32(residual)
    if names[-1] == "router":
      return x * np.float32(_ROUTER_SCALE)
    if names[-1] == "hash_table":
      layer = int(names[0].removeprefix("layers_"))
      return jnp.asarray(hash_table(token_counts, config.num_experts, config.top_k, seed + layer))
    if names[-2:] in (["attention_hc", "base"], ["ffn_hc", "base"]):
      n = config.hc_mult
      return x.at[2 * n :].set(_STREAM_KEEPS * jnp.eye(n).reshape(-1))
    return x

  return {"params": jax.tree_util.tree_map_with_path(adapt, params)}


def hash_table(token_counts: np.ndarray, num_experts: int, top_k: int, seed: int) -> np.ndarray:
  """Experts of every token: int32 [V, K], distinct in a row, balanced by how often tokens occur.

  Tokens come in order of falling count; each takes the K experts with the least load so far,
  chosen at random among equals.
  """
  rng = np.random.default_rng(seed)
  load = np.zeros(num_experts)
  table = np.zeros((len(token_counts), top_k), np.int32)
  # What never occurs counts a little, so that it is spread as well.
  counts = np.asarray(token_counts, np.float64) + 0.01
  for token in np.argsort(-counts, kind="stable"):
    least = np.lexsort((rng.random(num_experts), load))[:top_k]
    load[least] += counts[token]
    table[token] = rng.permutation(least)
  return table
