"""The families by the names that published config files give them."""

from typing import Any

import jax

from moejax.models.config import Config, Fields
from moejax.models.deepseek_moe import DeepseekMoe
from moejax.models.deepseek_v4 import DeepseekV4
from moejax.models.mixtral import Mixtral
from moejax.models.model import Model
from moejax.models.olmoe import Olmoe
from moejax.models.qwen2_moe import Qwen2Moe
from moejax.models.qwen3_moe import Qwen3Moe
from moejax.models.state import state_size


def family_of(config: Config) -> type[Model]:
  """The family of a config record."""
  return FAMILIES[config.family]


def config_from_hf(values: dict[str, Any]) -> Config:
  """The record of a config.json as it stands in a published checkpoint.

  Raises:
    ValueError: an unknown model_type, a missing field, or a value this code does not compute.
  """
  name = values.get("model_type")
  if name not in FAMILIES:
    known = ", ".join(sorted(FAMILIES))
    raise ValueError(f"config.json: unknown model_type {name!r}, expected one of {known}.")
  return FAMILIES[name].read_config(Fields(values))


def persistent_state_size(config: Config, position: int) -> int:
  """Number of float values that survive position `position` (from 0), without any memory."""
  model = family_of(config)(config)
  return state_size(jax.eval_shape(lambda: model.init_state(1, position + 1)), position + 1)


FAMILIES: dict[str, type[Model]] = {
  "deepseek": DeepseekMoe,
  "deepseek_v4": DeepseekV4,
  "mixtral": Mixtral,
  "olmoe": Olmoe,
  "qwen2_moe": Qwen2Moe,
  "qwen3_moe": Qwen3Moe,
}
