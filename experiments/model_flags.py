"""Flags that every script with a model shares, and what they mean."""

from absl import flags
import jax.numpy as jnp

import moejax
from moejax import combine
from moejax.checkpoints import LoadedModel
from moejax.models import Execution, Mode

_MODEL = flags.DEFINE_string("model", None, "A directory in the layout of Hugging Face.")
_ARITHMETIC = flags.DEFINE_enum("arithmetic", "canonical", ["canonical", "fast"], "Of the run.")
_ROUNDING = flags.DEFINE_enum(
  "rounding", "reference", ["reference", "hf", "float32"], "Where values are rounded to BF16."
)
_CONTRACT = flags.DEFINE_enum(
  "contract", "native", ["native", "eager"], "The family's combine, or transformers' eager one."
)
_SCHEME = flags.DEFINE_enum(
  "scheme", None, list(combine.SCHEMES), "Operand and accumulator of every combine; none: native."
)
_ORDER_SEED = flags.DEFINE_integer(
  "order_seed", None, "Request number of a layer-static schedule of orders; none: native order."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of schedules.")
_KV_BITS = flags.DEFINE_integer("kv_bits", None, "Simulated KV quantiser.", 2, 8)
_ACTIVATIONS = flags.DEFINE_enum(
  "activations", "none", ["none", "qdq", "int8"], "Simulated quantisation of activations."
)

flags.mark_flag_as_required("model")


def load() -> LoadedModel:
  """The model that --model names, in the dtype that --rounding needs."""
  dtype = "float32" if _ROUNDING.value == "float32" else "bfloat16"
  return moejax.load(_MODEL.value, dtype)


def mode() -> Mode:
  """The static choices."""
  return Mode(
    arithmetic=_ARITHMETIC.value,
    rounding=_ROUNDING.value,
    contract=_CONTRACT.value,
    activations=_ACTIVATIONS.value,
  )


def execution(model: LoadedModel) -> Execution:
  """The scheme, the schedule and the KV quantiser for every token."""
  config, codes, orders, kv_bits = model.config, None, None, None
  if _SCHEME.value is not None:
    codes = jnp.full((1, 1, 1), combine.named(_SCHEME.value).code, jnp.int32)
  if _ORDER_SEED.value is not None:
    orders = combine.schedule(_SEED.value, _ORDER_SEED.value, config.num_layers, config.top_k)
    orders = jnp.asarray(orders, jnp.int32)[:, None, None]
  if _KV_BITS.value is not None:
    kv_bits = jnp.full((1, 1, 1), _KV_BITS.value, jnp.int32)
  return Execution(codes=codes, orders=orders, kv_bits=kv_bits)


def record() -> dict:
  """The choices as a run record keeps them."""
  return dict(
    scheme=_SCHEME.value,
    order_seed=_ORDER_SEED.value,
    seed=_SEED.value,
    kv_bits=_KV_BITS.value,
  )
