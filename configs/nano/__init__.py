"""The nano models: what they are and how they are trained."""

from configs.nano import deepseek, deepseek_v4, olmoe, qwen2_moe, qwen3_moe
from configs.nano.nano import Nano

_ALL = (deepseek_v4, olmoe, qwen2_moe, qwen3_moe, deepseek)
NANO = {nano.family: nano for nano in (family.get() for family in _ALL)}
