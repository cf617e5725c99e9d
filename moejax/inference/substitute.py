"""Endpoint substitution: the difference of two persistent states, added to one of them.

Three kinds of difference. "float64" is the paper's (2.4.3): taken and added in FP64 on the host,
cast to the state's dtype. It cannot carry -0, infinities, NaN or extreme ratios to a different
value, so what it gives is compared with the endpoint and what it missed is counted. "float32" is
the same in FP32, which loses low bits. "xor" is of bit patterns: exact for every pattern, usable
under jit. Where endpoints are equal bit for bit, -inf included, the
difference is -0.0, which changes no value, or no bit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models import PersistentState

KINDS = ("float64", "float32", "xor")
_BITS = {2: np.uint16, 4: np.uint32}


def difference(
  branch: PersistentState, native: PersistentState, kind: str = "float64"
) -> PersistentState:
  """branch - native as a tree of NumPy arrays, for `substitute`.

  Raises:
    ValueError: states of different configs or positions, or an unknown kind.
  """
  if kind not in KINDS:
    raise ValueError(f"difference: kind must be one of {', '.join(KINDS)}, got {kind!r}.")
  _require_alike("difference", branch, native)
  if (np.asarray(branch.position) != np.asarray(native.position)).any():
    raise ValueError("difference: the states are at different positions.")

  def leaf(b, n):
    b, n = np.asarray(b), np.asarray(n)
    if b.dtype == np.int32:  # the position, equal
      return np.zeros_like(b)
    if kind == "xor":
      return _bits(b) ^ _bits(n)
    with np.errstate(invalid="ignore"):  # inf - inf, where they are equal
      delta = b.astype(kind) - n.astype(kind)
    return np.where(_bits(b) == _bits(n), delta.dtype.type(-0.0), delta)

  return jax.tree.map(leaf, branch, native)


def substitute(
  state: PersistentState,
  delta: PersistentState,
  *,
  before: PersistentState | None = None,
  after: PersistentState | None = None,
) -> PersistentState:
  """The state with a difference added to every tensor.

  Args:
    state: of the same config and batch as the difference.
    delta: of `difference`; one of bits may be traced.
    before, after: guards: what the state must be, bit for bit, before and after the addition.

  Raises:
    ValueError: a guard does not hold, or the states do not belong together.
  """
  _require_alike("substitute", state, delta)
  if before is not None:
    _require_same("before", state, before)
  result = _add(state, delta)
  if after is not None:
    _require_same("after", result, after)
  return result


def _add(state: PersistentState, delta: PersistentState) -> PersistentState:

  def leaf(x, d):
    if x.dtype == jnp.int32:
      return x
    if np.issubdtype(d.dtype, np.unsignedinteger):
      bits = jax.lax.bitcast_convert_type(x, d.dtype) ^ jnp.asarray(d)
      return jax.lax.bitcast_convert_type(bits, x.dtype)
    # On the host: jitted FP64 would flush subnormals.
    total = (np.asarray(x).astype(d.dtype) + d).astype(np.float32)
    return jnp.asarray(total).astype(x.dtype)

  return jax.tree.map(leaf, state, delta)


def num_differing(a: PersistentState, b: PersistentState) -> int:
  """How many values of two states differ in their bits."""
  _require_alike("num_differing", a, b)
  differ = jax.tree.map(lambda x, y: int((_bits(x) != _bits(y)).sum()), a, b)
  return sum(jax.tree.leaves(differ))


def _require_same(when: str, found: PersistentState, expected: PersistentState) -> None:
  if differing := num_differing(found, expected):
    raise ValueError(
      f"substitute: {when} the addition {differing} values of the state are not the captured ones."
    )


def _bits(x) -> np.ndarray:
  x = np.asarray(x)
  return x.view(_BITS[x.dtype.itemsize])


def _require_alike(name: str, a: PersistentState, b: PersistentState) -> None:
  shapes = [jax.tree.map(lambda x: x.shape, state) for state in (a, b)]
  if shapes[0] != shapes[1]:
    raise ValueError(f"{name}: the states are of different configs or batches.")
