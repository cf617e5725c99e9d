"""The debug switch for the documented domain: no nonzero product or partial sum below 2^-126.

XLA flushes subnormals to zero and the custom calls keep them, so bits are promised only where none
arises; trained weights never come near. `MOEJAX_CHECK_DOMAIN=1` evaluates every canonical sum on
the host, in NumPy, with the same bits and very slowly, and raises DomainError naming the offending
row. Inside jitted code the error arrives as a JaxRuntimeError that carries the sentence.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import bf16

_SMALLEST = 2.0**-126
_BLOCK = 256


class DomainError(ArithmeticError):
  """A product or partial sum lies outside the domain on which bits are promised."""


def checking() -> bool:
  """Whether MOEJAX_CHECK_DOMAIN is set; read when a function is called or traced."""
  return os.environ.get("MOEJAX_CHECK_DOMAIN", "0") == "1"


def dot(name, a, w, *, blocked=False, lengths=None, transposed=False):
  """`dots.dot`, `dots.dot_f32` or `dots.batched_dot`, checked."""
  n = w.shape[-2] if transposed else w.shape[-1]
  out = jax.ShapeDtypeStruct((*a.shape[:-1], n), jnp.float32)
  operands = (a, w) if lengths is None else (a, w, lengths)

  def host(a, w, lengths=None):
    a, w = np.asarray(a).astype(np.float64), np.asarray(w).astype(np.float64)
    w = np.swapaxes(w, -1, -2) if transposed else w
    # vmap puts its axes in front of both; a 2-d w serves every row of a.
    if w.ndim < a.ndim or lengths is None:
      w = w.reshape(*w.shape[:-2], *(1,) * (a.ndim - w.ndim), *w.shape[-2:])
    return _fold(name, a, w, _BLOCK if blocked else None, lengths, transposed)

  return _on_host(host, out, *operands)


def grouped_dot(x, w, ids):
  """`dots.grouped_dot` with x [T, S or 1, K], checked."""
  out = jax.ShapeDtypeStruct((*ids.shape, w.shape[-1]), jnp.float32)

  def host(x, w, ids):
    x, w, ids = (np.asarray(v) for v in (x, w, ids))
    lead = np.broadcast_shapes(x.shape[:-3], w.shape[:-3], ids.shape[:-2])
    x, w, ids = (
      np.broadcast_to(v, (*lead, *v.shape[v.ndim - inner :]))
      for v, inner in ((x, 3), (w, 3), (ids, 2))
    )
    result = np.zeros((*ids.shape, w.shape[-1]), np.float32)
    for at in np.ndindex(*lead, ids.shape[-2], ids.shape[-1]):
      expert, slot = ids[at], 0 if x.shape[-2] == 1 else at[-1]
      if 0 <= expert < w.shape[-3]:
        row = x[(*at[:-1], slot)][None].astype(np.float64)
        matrix = w[(*at[:-2], expert)].astype(np.float64)
        result[at] = _fold(f"grouped_dot: token {at[-2]}, slot {at[-1]}", row, matrix, None)[0]
    return result

  return _on_host(host, out, x, w, ids)


def check_rows(name, x):
  """Returns x, a float32 [..., W] array, after checking every partial sum of its halving trees."""

  def host(x):
    sums = np.asarray(x)
    _refuse(name, "element", sums)
    while sums.shape[-1] > 1:
      width = 1 << (sums.shape[-1] - 1).bit_length() - 1
      sums = np.pad(sums, [(0, 0)] * (sums.ndim - 1) + [(0, 2 * width - sums.shape[-1])])
      exact = sums[..., :width].astype(np.float64) + sums[..., width:]
      _refuse(name, "partial sum", exact)
      sums = exact.astype(np.float32)
    return np.asarray(x)

  if isinstance(x, np.ndarray):
    return host(x)
  return _on_host(host, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)


def check_sums(name, terms, orders, codes):
  """Returns terms, float32 [*B, K, H], after checking every partial sum of `combine_rows`.

  orders is int32 [*B, K], codes int32 [*B].
  """

  def host(terms, orders, codes):
    terms, orders, codes = np.asarray(terms), np.asarray(orders), np.asarray(codes)
    lead = np.broadcast_shapes(terms.shape[:-2], orders.shape[:-1], codes.shape)
    terms = np.broadcast_to(terms, (*lead, *terms.shape[-2:]))
    orders = np.broadcast_to(orders, (*lead, orders.shape[-1]))
    codes = np.broadcast_to(codes, lead)[..., None]
    total = np.zeros((*lead, terms.shape[-1]), np.float32)
    for j in range(orders.shape[-1]):
      at = orders[..., j, None, None]
      term = np.take_along_axis(terms, at, axis=-2)[..., 0, :]
      term = np.where(codes % 2 == 1, bf16.round_bf16(term), term)
      exact = total.astype(np.float64) + term
      _refuse(name, f"partial sum {j + 1}", exact)
      total = exact.astype(np.float32)
      total = np.where(codes // 2 == 1, bf16.round_bf16(total), total)
    return terms

  out = jax.ShapeDtypeStruct(terms.shape, jnp.float32)
  return _on_host(host, out, terms, orders, codes)


def _fold(name, a, w, block, lengths=None, transposed=False):
  """The canonical fold in FP64 steps, each rounded to FP32.

  53 bits hold a product of floats exactly, and a sum of two floats well enough that rounding twice
  is rounding once (Figueroa 1995).
  """
  depth = a.shape[-1]
  shape = np.broadcast_shapes((*a.shape[:-1], 1), (*w.shape[:-2], 1, w.shape[-1]))
  total = np.zeros(shape, np.float32)
  part = np.zeros_like(total)
  for k in range(depth):
    product = a[..., k, None] * w[..., k, None, :]
    if lengths is not None and not transposed:
      inside = k < np.asarray(lengths)[..., None]
      product = np.where(inside, product, 0.0)
    elif lengths is not None:
      inside = np.arange(w.shape[-1]) < np.asarray(lengths)[..., None]
      product = np.where(inside, product, 0.0)
    _refuse(name, f"product at k = {k}", product)
    exact = part + product.astype(np.float32).astype(np.float64)
    _refuse(name, f"partial sum at k = {k}", exact)
    part = exact.astype(np.float32)
    if block is not None and (k + 1) % block == 0:
      total, part = total + part, np.zeros_like(part)
  return total + part  # +0 + part, whose zeros are all +0


def _refuse(name, what, exact):
  bad = (exact != 0) & (np.abs(exact) < _SMALLEST)
  if bad.any():
    at = np.argwhere(bad)[0]
    row = ", ".join(str(i) for i in at[:-1]) or "0"
    value = float(np.asarray(exact)[tuple(at)])
    raise DomainError(
      f"{name}: row {row}, column {at[-1]}: the {what} is {value:.3g}, below 2^-126, where "
      "bits are not promised."
    )


def _on_host(host, out, *operands):
  if any(isinstance(operand, jax.core.Tracer) for operand in operands):
    return jax.pure_callback(host, out, *operands, vmap_method="expand_dims")
  return jnp.asarray(host(*operands))
