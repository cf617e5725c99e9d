"""The experts of a MoE layer, their combine under a contract, and the shared expert's merge."""

from collections.abc import Callable

from flax import linen as nn
import jax.numpy as jnp

from moejax.combine import Contract, merge_shared
from moejax.combine.reduce import combine_rows
from moejax.models.execution import Mode
from moejax.models.indexing import take
from moejax.models.layers import experts_init, silu_times_up
from moejax.models.router import Route
from moejax.models.run import Run


class Experts(nn.Module):
  """Routed experts: [B, T, D] and a route → weighted terms [B, T, K, D] by ascending id.

  Attributes:
    num: E.
    inner: F.
    activate: function of (run, [..., 2F]) → [..., F].
  """

  num: int
  inner: int
  activate: Callable = silu_times_up

  @nn.compact
  def __call__(self, run: Run, x, route: Route, contract: Contract):
    width, ops = x.shape[-1], run.ops
    gate_up = self.param("gate_up", experts_init, (self.num, width, 2 * self.inner))
    down = self.param("down", experts_init, (self.num, self.inner, width))
    slots = route.ids.shape
    ids = route.ids.reshape(-1, slots[-1])
    gates = route.weights
    if contract.gate_dtype == "bfloat16":
      gates = ops.round(gates)
    gates = gates[..., None]
    hidden = ops.grouped(run.quantize(x).reshape(-1, width), gate_up, ids)
    hidden = self.activate(run, ops.round(hidden.reshape(*slots, -1)))
    if contract.gate_point == "before_down":
      hidden = ops.multiply(hidden, jnp.broadcast_to(gates, hidden.shape))
    hidden = run.quantize(ops.round(hidden)).reshape(*ids.shape, -1)
    outputs = ops.grouped(hidden, down, ids).reshape(*slots, width)
    if contract.gate_point == "before_down":
      return outputs
    if contract.gate_point == "after_down":
      outputs = ops.round(outputs)
    return ops.multiply(outputs, jnp.broadcast_to(gates, outputs.shape))


def combine_terms(run: Run, terms, route: Route, shared, contract: Contract):
  """Adds terms [B, T, K, D] as the execution says, and the shared output [B, T, D] or None.

  Returns:
    (output [B, T, D], trace entries).
  """
  combine = _combine_canonical if run.mode.arithmetic == "canonical" else _combine_fast
  routed = combine(run, terms, route, contract)
  output = merge_shared(routed, shared, contract, rounding=run.ops.round)
  trace = dict(terms=terms, routed=routed, combined=output)
  if shared is not None:
    trace["shared"] = shared
  if run.taps.nan_experts:
    bad = jnp.isnan(terms).any(axis=-1) & (route.ids >= 0)
    lowest = jnp.where(bad, route.ids, jnp.iinfo(jnp.int32).max).min(axis=-1)
    trace["nan_experts"] = jnp.where(bad.any(axis=-1), lowest, -1)
  return output, trace


def _codes(run: Run, contract: Contract, shape):
  """Contract codes of [B, T] tokens."""
  native = jnp.full(shape, contract.code, jnp.int32)
  asked = run.execution.codes
  return native if asked is None else jnp.where(asked < 0, native, asked)


def _orders(run: Run, route: Route, contract: Contract):
  """Orders [B, T, K] over the terms by ascending id."""
  native = route.slots
  if contract.order == "ascending_id":
    native = jnp.broadcast_to(jnp.arange(native.shape[-1], dtype=jnp.int32), native.shape)
  asked = run.execution.orders
  return native if asked is None else jnp.where(asked[..., :1] < 0, native, asked)


def _combine_canonical(run, terms, route, contract):
  codes = _codes(run, contract, terms.shape[:2])
  return combine_rows(terms, _orders(run, route, contract), codes, allow_nan=True)


def _combine_fast(run, terms, route, contract):
  """Differentiable; an exact accumulator is a float32 one, and orders matter only where asked."""
  if run.execution.orders is not None:
    terms = take(terms, _orders(run, route, contract)[..., None], axis=2)
  if run.execution.codes is None:
    round_operand, round_total = contract.operand == "bfloat16", contract.accumulator == "bfloat16"
    if not round_total:
      return (run.ops.round(terms) if round_operand else terms).sum(axis=2)
  else:
    codes = _codes(run, contract, terms.shape[:2])[..., None]
    round_operand, round_total = codes % 2 == 1, codes // 2 == 1

  def rounded(asked, x):
    if isinstance(asked, bool):
      return run.ops.round(x) if asked else x
    return jnp.where(asked, run.ops.round(x), x)

  total = jnp.zeros_like(terms[:, :, 0])
  for k in range(terms.shape[2]):
    total = rounded(round_total, total + rounded(round_operand, terms[:, :, k]))
  return total


def route_trace(route: Route, logits):
  """The trace entries of a route."""
  return dict(
    router_logits=logits,
    ids=route.ids,
    weights=route.weights,
    slots=route.slots,
    margins=route.margins,
    ties=route.ties,
  )


def transformers_contract(mode: Mode) -> Contract:
  """How transformers 5 sums BF16 experts whose gates are BF16, checked bit for bit against it.

  By default (grouped and batched products) over slots in float32, rounded once; its eager loop adds
  in BF16 by ascending id. A shared expert joins the rounded sum.
  """
  eager = mode.contract == "eager"
  return Contract(
    "transformers eager" if eager else "transformers",
    operand="bfloat16",
    accumulator="bfloat16" if eager else "float32",
    gate_point="after_down",
    gate_dtype="bfloat16",
    order="ascending_id" if eager else "slot",
    shared_merge="rounded",
  )
