"""The nano models: what they are and how they are trained."""

from configs.nano import deepseek_v4, olmoe
from configs.nano.nano import Nano

NANO = {nano.family: nano for nano in (deepseek_v4.get(), olmoe.get())}
