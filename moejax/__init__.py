"""What finite precision does to sparse mixture-of-experts inference, bit by bit."""

from moejax import checkpoints, combine, inference, models, numerics
from moejax.checkpoints import load
from moejax.models import Delta, Execution, Mode, Pins, Taps
