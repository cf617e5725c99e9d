"""The grouped product and its gradient, against one ordinary product per row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models.grouped import grouped_product

EXPERTS, WIDTH, OUT = 7, 12, 10


def plain(x, w, ids):
  """[N, S, K] rows, each times the matrix of its expert; zeros where there is none."""
  out = np.zeros((*ids.shape, OUT))
  for n, s in np.ndindex(*ids.shape):
    if ids[n, s] >= 0:
      out[n, s] = x[n, s].astype(np.float64) @ w[ids[n, s]]
  return out


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
  "ids",
  [
    np.random.default_rng(0).integers(-1, EXPERTS, (50, 3)),  # some rows without an expert
    np.full((41, 2), 4),  # every row in one
    np.random.default_rng(1).integers(0, 2, (300, 3)) * 6,  # two experts, blocks of more than 8
  ],
)
def test_product_and_gradient(ids, wide):
  ids = ids.astype(np.int32)
  rng = np.random.default_rng(2)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  x = draw(*ids.shape, WIDTH) if wide else draw(len(ids), WIDTH)
  w, g = draw(EXPERTS, WIDTH, OUT), draw(*ids.shape, OUT)
  every = np.broadcast_to(x if wide else x[:, None], (*ids.shape, WIDTH))
  out, pull = jax.jit(lambda x, w, g: (lambda y, f: (y, f(g)))(
    *jax.vjp(lambda x, w: grouped_product(x, w, jnp.asarray(ids)), x, w)
  ))(x, w, g)  # fmt: skip
  # Sums of up to 600 products of standard normals, in float32 against float64.
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  close(out, plain(every, w, ids))
  grad_x = np.zeros(every.shape)
  grad_w = np.zeros(w.shape)
  for n, s in np.ndindex(*ids.shape):
    if ids[n, s] >= 0:
      grad_x[n, s] = w[ids[n, s]].astype(np.float64) @ g[n, s]
      grad_w[ids[n, s]] += np.outer(every[n, s].astype(np.float64), g[n, s])
  close(pull[0], grad_x if wide else grad_x.sum(axis=1))
  close(pull[1], grad_w)
