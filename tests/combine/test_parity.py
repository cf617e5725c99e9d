"""Live comparison with PyTorch and transformers (extra `parity`): real runtimes obey our contracts.

transformers has three implementations of a BF16 expert layer. Each is run on random weights, the
expert outputs that enter its combine are captured, and the combine is redone here under the
contract that the model of the family declares: every bit must agree.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import combine, numerics
from moejax.models import FAMILIES, Mode
from tests.oracles import assert_same_bits

# Warnings of the foreign libraries are theirs.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


def to_numpy(tensor):
  return tensor.detach().float().numpy()


def test_round_bf16_equals_torch():
  import torch

  high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
  low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
  x = (high[:, None] | low).reshape(-1).view(np.float32)
  x = x[~np.isnan(x)]
  want = torch.from_numpy(x.copy()).bfloat16().float().numpy()
  assert_same_bits(numerics.round_bf16(x), want)


@pytest.mark.parametrize("num_terms", [2, 4, 6, 8])
def test_torch_reductions_are_the_schemes(num_terms):
  import torch

  rng = np.random.default_rng(num_terms)
  terms = rng.standard_normal((num_terms, 256)).astype(np.float32)
  order = np.arange(num_terms)
  tensors = torch.from_numpy(terms)
  rounded = tensors.bfloat16()
  one_at_a_time = torch.zeros(1, 256, dtype=torch.bfloat16)
  for term in rounded:
    one_at_a_time.index_add_(0, torch.zeros(1, dtype=torch.long), term[None])
  summed = rounded[None].sum(dim=1)  # FP32 inside, one rounding
  plain = torch.zeros(256)
  for term in tensors:
    plain = plain + term
  device = jnp.asarray(terms)
  assert_same_bits(combine.combine(device, order, combine.B), to_numpy(one_at_a_time)[0])
  c = combine.merge_shared(combine.combine(device, order, combine.C), None, combine.C)
  assert_same_bits(c, to_numpy(summed)[0])
  assert_same_bits(combine.combine(device, order, combine.P32), plain.numpy())


# model_type → the class prefix in transformers, and its config's expert fields.
EXPERTS = {
  "olmoe": ("Olmoe", dict(intermediate_size=32, num_experts=16, num_experts_per_tok=8)),
  "qwen2_moe": ("Qwen2Moe", dict(moe_intermediate_size=32, num_experts=12, num_experts_per_tok=4)),
  "qwen3_moe": ("Qwen3Moe", dict(moe_intermediate_size=32, num_experts=16, num_experts_per_tok=8)),
  "mixtral": (
    "Mixtral",
    dict(intermediate_size=32, num_local_experts=8, num_experts_per_tok=4),
  ),
  "deepseek_v4": (
    "DeepseekV4",
    dict(moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=6),
  ),
}


def build_experts(family):
  """An experts module of the family in BF16 with random weights, and its config."""
  import importlib

  import torch
  import transformers

  prefix, fields = EXPERTS[family]
  module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
  config = getattr(transformers, f"{prefix}Config")(hidden_size=64, **fields)
  torch.manual_seed(0)
  experts = getattr(module, f"{prefix}Experts")(config)
  for parameter in experts.parameters():
    parameter.data.normal_(0, 1.6 / parameter.shape[-1] ** 0.5)
  return experts.to(torch.bfloat16).eval(), config


def capture(experts, config, x, ids, gates, implementation, monkeypatch):
  """Runs the module: expert outputs before the gate [T, K, H] in slot order, and its result."""
  import torch
  import torch.nn.functional as functional
  from transformers.integrations import moe

  config._experts_implementation_internal = implementation
  owner, name = {
    "eager": (functional, "linear"),
    "batched_mm": (moe, "_batched_linear"),
    "grouped_mm": (moe, "_grouped_linear"),
  }[implementation]
  seen, original = [], getattr(owner, name)

  def spy(*args, **kwargs):
    seen.append(original(*args, **kwargs))
    return seen[-1].clone()

  with monkeypatch.context() as patch:
    patch.setattr(owner, name, spy)
    result = experts(x, ids, gates)
  outputs = torch.zeros(*ids.shape, x.shape[-1])
  if implementation == "eager":
    for expert, down in zip(sorted(set(ids.flatten().tolist())), seen[1::2]):
      slots, tokens = torch.where((ids == expert).T)
      outputs[tokens, slots] = down.float()
  else:
    down = seen[1]
    if implementation == "grouped_mm":
      down = down[torch.argsort(torch.sort(ids.reshape(-1))[1])]
    outputs = down.float().reshape(outputs.shape)
  return outputs.numpy(), to_numpy(result)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_transformers_experts_follow_their_contract(family, implementation, monkeypatch):
  import torch

  mode = Mode(rounding="hf", contract="eager" if implementation == "eager" else "native")
  contract = FAMILIES[family](None).contract(mode)
  experts, config = build_experts(family)
  tokens, slots = 9, config.num_experts_per_tok
  generator = torch.Generator().manual_seed(1)
  x = torch.randn(tokens, 64, generator=generator).bfloat16()
  ids = torch.stack(
    [torch.randperm(experts.num_experts, generator=generator)[:slots] for _ in range(tokens)]
  )
  gates = torch.rand(tokens, slots, generator=generator).to(getattr(torch, contract.gate_dtype))
  with torch.no_grad():
    outputs, result = capture(experts, config, x, ids, gates, implementation, monkeypatch)
  # Gate times the rounded output in FP32; B and C round the product.
  assert contract.gate_point == "after_down"
  slot_terms = outputs * to_numpy(gates)[..., None]
  by_id = np.argsort(ids.numpy(), axis=1, kind="stable")
  terms = np.take_along_axis(slot_terms, by_id[..., None], axis=1)
  orders = np.tile(np.arange(slots), (tokens, 1))
  if contract.order == "slot":
    orders = np.argsort(by_id, axis=1)  # slot order over terms by id
  codes = jnp.full(tokens, contract.code, jnp.int32)
  sums = combine.combine_rows(jnp.asarray(terms), jnp.asarray(orders, jnp.int32), codes)
  assert_same_bits(combine.merge_shared(sums, None, contract), result)


def test_canonical_dot_is_as_accurate_as_torch():
  import torch

  rng = np.random.default_rng(0)
  a = torch.from_numpy(rng.standard_normal((8, 512)).astype(np.float32)).bfloat16()
  w = torch.from_numpy(rng.standard_normal((512, 64)).astype(np.float32)).bfloat16()
  exact = (a.double() @ w.double()).numpy()
  ours = numerics.dot(
    jnp.asarray(to_numpy(a), jnp.bfloat16), jnp.asarray(to_numpy(w), jnp.bfloat16)
  )
  # Worst case of a sequential FP32 sum: K half ulps of the sum of magnitudes.
  bound = 512 * 2.0**-24 * (a.double().abs() @ w.double().abs()).numpy()
  assert (np.abs(np.asarray(ours) - exact) <= bound).all()
