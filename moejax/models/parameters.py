"""Parameters of a config without a checkpoint: how many there are, and random ones."""

import functools
import math

import jax
import jax.numpy as jnp

from moejax.models.config import Config
from moejax.models.execution import Mode
from moejax.models.families import family_of
from moejax.models.tensors import Tensor

_TRAINING = Mode("fast", "float32")


def num_parameters(config: Config) -> int:
  """Weights of the model, from shapes alone; tables of expert ids are not weights."""
  return sum(math.prod(t.shape) for t in family_of(config).tensors(config) if t.dtype != "int32")


def num_active_parameters(config: Config) -> int:
  """Weights that one token reads: of the experts those it is routed to, of the embedding a row."""

  def read(tensor: Tensor) -> int:
    size = math.prod(tensor.shape)
    if tensor.path == ("embed",) and not config.tie_embeddings:
      return size // config.vocab_size
    if "experts" in tensor.path:
      return size // config.num_experts * config.top_k
    return size

  return sum(read(t) for t in family_of(config).tensors(config) if t.dtype != "int32")


def parameter_dtype(tensor: Tensor, dtype: str):
  """What a parameter is kept in when weights are kept in `dtype`."""
  return jnp.dtype(dtype if tensor.dtype == "weight" else tensor.dtype)


def init_params(config: Config, key: jax.Array, dtype: str = "bfloat16"):
  """Random parameters, {"params": ...}, with the dtypes that a loaded checkpoint would have.

  Args:
    config: of the model.
    key: PRNG key.
    dtype: "bfloat16" or "float32", of the weights.
  """
  return _init(config, key, dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _init(config, key, dtype):
  model = family_of(config)(config)
  tensors = {t.path: t for t in model.tensors(config)}

  def cast(path, x):
    return x.astype(parameter_dtype(tensors[tuple(entry.key for entry in path)], dtype))

  state = model.init_state(1, 1, _TRAINING)
  params = model.init(key, jnp.zeros((1, 1), jnp.int32), state, mode=_TRAINING)["params"]
  return {"params": jax.tree_util.tree_map_with_path(cast, params)}
