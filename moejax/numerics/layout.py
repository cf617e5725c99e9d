"""Bit patterns of float32: one bit of sign, 8 of exponent, 23 of fraction."""

import numpy as np

SIGN = np.uint32(0x80000000)  # also the bits of -0
MAGNITUDE = np.uint32(0x7FFFFFFF)
FRACTION = np.uint32(0x007FFFFF)
INFINITY = np.uint32(0x7F800000)  # also the mask of the exponent field
NAN = np.uint32(0x7FC00000)  # the quiet one that stands for all
HIGH_HALF = np.uint32(0xFFFF0000)  # what BF16 keeps
