"""What XLA does to arithmetic, how `backend` answers it, and one recorded digest of all functions.

Measured with jaxlib 0.10.2 on a CPU with FMA: share of results whose bits change in a jitted
program without `fence` and `hold`.

  a·b + c, c - a·b, a·b + b·c  contracted to a fused multiply-add   30 %
  (x + 1) - 1                  becomes x                            43 %
  (x + M) - M, M = 1.5·2^23    becomes x                           100 %
  x / 7                        becomes x · (1 / 7)                  55 %
  x / broadcast(s)             becomes x · broadcast(1 / s)         27 %
  1 / √x                       becomes an inexact rsqrt             36 %
  (a / b) / c                  becomes a / (b · c)                  35 %

Nothing promises that XLA goes on doing so; the tests say that with `fence` and `hold` it does not
matter.
"""

import hashlib
import os
import pathlib
import platform
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.numerics import backend, elementwise, rope, rows

ROOT = pathlib.Path(__file__).parents[2]
ONE, SEVEN, MAGIC = np.float32(1), np.float32(7), np.float32(1.5 * 2**23)


def product_plus(v, a, b, c):
  return v.fence(a * b) + c


def minus_product(v, a, b, c):
  return c - v.fence(a * b)


def sum_of_products(v, a, b, c):
  return v.fence(a * b) + v.fence(b * c)


def add_then_subtract(v, a, b, c):
  return v.hold(a + ONE) - ONE


def round_by_magic(v, a, b, c):
  return v.hold(a + MAGIC) - MAGIC


def divide_by_constant(v, a, b, c):
  # Tied to the dividend: vmap would broadcast a plain constant after its `hold`, where XLA sees it.
  return a / v.hold(v.xp.where(a == a, SEVEN, a))


def divide_by_broadcast(v, a, b, c):
  return a / v.hold(v.xp.broadcast_to(b[..., :1], a.shape))


def divide_by_sqrt(v, a, b, c):
  return ONE / v.hold(v.xp.sqrt(b))


def divide_twice(v, a, b, c):
  # The divisor too: a closed-over c is a constant while the held quotient is not.
  return v.hold(a / b) / v.hold(c)


PATTERNS = (
  product_plus,
  minus_product,
  sum_of_products,
  add_then_subtract,
  round_by_magic,
  divide_by_constant,
  divide_by_broadcast,
  divide_by_sqrt,
  divide_twice,
)


def operands():
  """a, b, c: float32 [40, 53], b positive."""
  rng = np.random.default_rng(0)
  a, c = rng.normal(size=(2, 40, 53))
  return tuple(v.astype(np.float32) for v in (a, rng.uniform(0.5, 8, (40, 53)), c))


def over(pattern):
  return lambda a, b, c: pattern(backend.backend(a), a, b, c)


def closed_over(pattern, *arguments):
  return jax.jit(lambda: over(pattern)(*(jnp.asarray(v) for v in arguments)))()


RUNS = {
  "eager": lambda pattern, *arguments: over(pattern)(*(jnp.asarray(v) for v in arguments)),
  "jit": lambda pattern, *arguments: jax.jit(over(pattern))(*arguments),
  "map": lambda pattern, *arguments: jax.jit(
    lambda *args: lax.map(lambda row: over(pattern)(*row), args)
  )(*arguments),
  "vmap": lambda pattern, *arguments: jax.jit(jax.vmap(over(pattern)))(*arguments),
  "closed_over": closed_over,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_fenced_and_held_arithmetic_has_the_bits_of_numpy(pattern, run):
  arguments = operands()
  actual = np.asarray(RUNS[run](pattern, *arguments)).view(np.uint32)
  np.testing.assert_array_equal(actual, over(pattern)(*arguments).view(np.uint32))


def inputs():
  """Arguments made of exact or correctly rounded operations, the same on every machine."""
  linear = (np.arange(-20_000, 18_000) / 200).astype(np.float32)
  logarithmic = np.arange(0x01000000, 0x7F000000, 104_729, dtype=np.uint32).view(np.float32)
  x = linear[:37_000].reshape(100, 370).T
  weight = linear[20_100:20_200]
  # Any numbers do for cosines and sines, which would come from the host's library.
  cos, sin = linear[19_800:20_300].reshape(2, 5, 50)
  return linear, logarithmic, x, weight, x.reshape(74, 5, 100), cos, sin


def every_function(linear, logarithmic, x, weight, heads, cos, sin):
  return (
    elementwise.exp(linear),
    elementwise.log(logarithmic),
    elementwise.log1p(logarithmic),
    elementwise.sigmoid(linear),
    elementwise.silu(linear),
    elementwise.softplus(linear),
    elementwise.sqrt_softplus(linear),
    rows.tree_sum(x),
    rows.softmax(x),
    rows.logsumexp(x),
    rows.log_softmax(x),
    rows.rms_norm(x, eps=1e-6),
    rows.rms_norm(x, weight, eps=1e-5),
    rope.rotate_half(heads, cos, sin),
    rope.rotate_interleaved(heads, cos, sin),
    rope.rotate_interleaved(heads, cos, sin, inverse=True),
  )


def digest(run):
  """SHA-256 of all results, in hexadecimal."""
  results = run(every_function)(*inputs())
  return hashlib.sha256(b"".join(np.asarray(y).tobytes() for y in results)).hexdigest()


# Whoever changes a bit of a function on purpose records the new digest and says so.
RECORDED = "facf5e239fe3f62e3abd0f55d148a638e20b89ffc77e5cd5a2952047bf309d4b"


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["numpy", "jit"])
def test_all_functions_have_the_recorded_bits(run):
  assert digest(run) == RECORDED


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names an x86 flag")
def test_a_processor_without_fma_gives_the_recorded_bits():
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=SSE4_2"
  completed = subprocess.run(
    [
      sys.executable,
      "-c",
      "import jax; from tests.numerics import test_xla; print(test_xla.digest(jax.jit))",
    ],
    cwd=ROOT,
    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert completed.stdout.strip() == RECORDED
