"""Independent statements of the arithmetic: NumPy and ml_dtypes in plain loops, exact rationals.

Nothing here imports moejax. NumPy on the host neither contracts products nor flushes subnormals.
"""

import fractions

import ml_dtypes
import numpy as np


def bits(x):
  """uint32 view of a float32 array, for comparing bit patterns; NaNs count as one pattern."""
  x = np.array(x, np.float32)
  x[np.isnan(x)] = np.nan
  return x.view(np.uint32)


def assert_same_bits(actual, expected):
  """Equal as integers, and a readable message where not."""
  actual, expected = bits(actual), bits(expected)
  assert actual.shape == expected.shape
  wrong = np.argwhere(actual != expected)
  if len(wrong):
    at = tuple(wrong[0])
    raise AssertionError(
      f"{len(wrong)} of {actual.size} differ, first at {at}: "
      f"{actual[at]:#010x} is not {expected[at]:#010x}"
    )


def to_bf16(x):
  """float32 rounded to BF16 by ml_dtypes, as float32."""
  return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def dot(a, w, block=None):
  """[M, K] × [K, N]: FP32 products added one k at a time from +0, optionally block by block."""
  a, w = np.asarray(a).astype(np.float32), np.asarray(w).astype(np.float32)
  total = np.zeros((a.shape[0], w.shape[1]), np.float32)
  for start in range(0, a.shape[1], block or max(a.shape[1], 1)):
    part = np.zeros_like(total)
    for k in range(start, min(a.shape[1], start + (block or a.shape[1]))):
      part = part + a[:, k : k + 1] * w[k]
    total = total + part
  return total


def combine(terms, order, operand, accumulator):
  """The paper's recurrence: a = +0, then a = R(a + R(v)) for the terms in order."""
  total = np.zeros(terms.shape[1], np.float32)
  with np.errstate(invalid="ignore", over="ignore"):
    for term in order:
      value = to_bf16(terms[term]) if operand == "bfloat16" else terms[term]
      total = total + value
      if accumulator == "bfloat16":
        total = to_bf16(total)
  return total


def round_fraction(value, significand=24, smallest=-149, top=128):
  """An exact rational rounded to the nearest binary float, ties to even; as a Python float."""
  if value == 0:
    return 0.0
  sign, value = (-1 if value < 0 else 1), abs(value)
  exponent = value.numerator.bit_length() - value.denominator.bit_length()
  while fractions.Fraction(2) ** (exponent + 1) <= value:
    exponent += 1
  while fractions.Fraction(2) ** exponent > value:
    exponent -= 1
  unit = fractions.Fraction(2) ** max(exponent - significand + 1, smallest)
  rounded = round(value / unit) * unit  # Fraction rounds half to even
  return sign * (float("inf") if rounded >= fractions.Fraction(2) ** top else float(rounded))


def exact_sum(terms):
  """Correctly rounded FP32 sum of each column of finite float32 [K, H]."""
  return np.array(
    [round_fraction(sum(fractions.Fraction(float(x)) for x in column)) for column in terms.T],
    np.float32,
  )


def awkward_terms(rng, num_terms, hidden):
  """float32 [K, H]: ordinary values, huge spreads, duplicates, signed zeros, infinities."""
  terms = rng.standard_normal((num_terms, hidden)).astype(np.float32)
  kind = rng.integers(0, 6, hidden)
  spread = np.exp2(rng.uniform(-40, 40, (num_terms, hidden))).astype(np.float32)
  terms = np.where(kind == 1, terms * spread, terms)
  terms = np.where(kind == 2, terms[:1], terms)  # duplicates
  zeros = np.where(rng.random((num_terms, hidden)) < 0.5, np.float32(-0.0), np.float32(0.0))
  terms = np.where((kind == 3) & (rng.random((num_terms, hidden)) < 0.7), zeros, terms)
  one_infinity = (kind == 4) & (np.arange(num_terms)[:, None] == 0) & (rng.random(hidden) < 0.2)
  terms = np.where(one_infinity, np.float32(np.inf), terms)
  # Around rounding ties of BF16.
  tie = (terms.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
  return np.where(kind == 5, tie, terms).astype(np.float32)


def subnormal_terms(rng, num_terms, hidden):
  """float32 [K, H] whose sums are subnormal."""
  words = rng.integers(0, 1 << 22, (num_terms, hidden)).astype(np.uint32)
  words |= rng.integers(0, 2, (num_terms, hidden)).astype(np.uint32) << np.uint32(31)
  return words.view(np.float32)
