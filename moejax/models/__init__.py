"""Sparse MoE decoders as pure functions of parameters, tokens, state and execution."""

from moejax.models.config import Config
from moejax.models.execution import Delta, Execution, Mode, NATIVE, PackedFormat, Pins, Taps
from moejax.models.families import (
  config_from_hf,
  FAMILIES,
  family_of,
  persistent_state_size,
)
from moejax.models.model import Model
from moejax.models.parameters import init_params, num_active_parameters, num_parameters
from moejax.models.state import export, flatten, PersistentState, restore
