"""What finite precision does to sparse mixture-of-experts inference, bit by bit."""

from moejax import combine, numerics

__all__ = ["combine", "numerics"]
