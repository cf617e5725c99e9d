"""Arithmetic whose bits do not depend on batch, shape, threads or machine; tools to view bits."""

from moejax.numerics.bf16 import is_bf16, round_bf16, ulp_bf16_distance, ulp_distance
from moejax.numerics.domain import DomainError
from moejax.numerics.dots import batched_dot, dot, dot_f32, grouped_dot
from moejax.numerics.elementwise import (
  exp,
  log,
  log1p,
  sigmoid,
  silu,
  softplus,
  sqrt_softplus,
)
from moejax.numerics.environment import Environment, probe_environment
from moejax.numerics.exact import exact_dot, exact_sum
from moejax.numerics.fingerprint import fingerprint
from moejax.numerics.formats import (
  decode_e8m0,
  decode_fp4,
  decode_fp8,
  dequantize_fp4,
  dequantize_fp8,
  scale_by_e8m0,
  unpack_fp4,
)
from moejax.numerics.library import KernelLibrary, native, StaleKernelsError
from moejax.numerics.materialize import materialize
from moejax.numerics.packed import (
  dequantize_packed,
  pack_codes,
  Packed,
  packed_nbytes,
  quantize_packed,
  quantize_with,
  unpack_codes,
)
from moejax.numerics.quantize import fake_quantize, qdq_fp4, qdq_fp8
from moejax.numerics.rope import inverse_frequencies, rope_tables, rotate_half, rotate_interleaved
from moejax.numerics.rows import (
  log_softmax,
  logsumexp,
  rms_norm,
  root_mean_square,
  softmax,
  tree_sum,
)
