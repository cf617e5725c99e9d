"""Bad input to models gets one clear sentence naming the thing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models import config_from_hf, Execution, Mode, NATIVE, Pins, Taps
from moejax.models.execution import DEFAULT
from tests.models import tiny
from tests.models.forks import (
  empty,
  TOKENS,
)
from tests.models.tiny import LENGTH


@pytest.fixture(params=tiny.FAMILIES, scope="module")
def model(request):
  return tiny.tiny(request.param)


@pytest.fixture(scope="module")
def v4():
  return tiny.tiny("deepseek_v4")


def apply(model, tokens=TOKENS[:1, :2], state=None, execution=NATIVE, mode=DEFAULT):
  state = empty(model) if state is None else state
  return jax.eval_shape(
    lambda: model.module.apply(model.params, jnp.asarray(tokens), state, execution, mode=mode)
  )


def test_state_of_another_config_batch_or_mode(model):
  mode = Mode("fast", "float32")
  narrow = dataclasses.replace(model.config, head_dim=model.config.head_dim * 2)
  fewer = empty(model).replace(layers=empty(model).layers[:1])
  for state, detail in (
    (empty(model, rows=3), r"int32 \(3,\) where int32 \(1,\) is expected"),
    (empty(model, mode=mode), "float32 .* where bfloat16"),
    (type(model.module)(narrow).init_state(1, LENGTH), "bfloat16 .* where bfloat16"),
    (fewer, "other layers"),
  ):
    with pytest.raises(ValueError, match="the state is of another config.*" + detail):
      apply(model, state=state)


@pytest.mark.parametrize(
  "tokens", [TOKENS[0, :2], TOKENS[:1, :2].astype(np.float32), TOKENS[:1, :0], TOKENS[:1, :2] > 3]
)
def test_tokens_of_another_rank_or_dtype(tokens):
  with pytest.raises(ValueError, match=r"tokens must be int32 \[B, T\], T ≥ 1, got"):
    apply(tiny.tiny("olmoe"), tokens)


def test_modes_that_a_family_does_not_have(v4):
  with pytest.raises(ValueError, match="activations 'qdq' is not a rule of olmoe"):
    apply(tiny.tiny("olmoe"), mode=Mode(activations="qdq"))
  with pytest.raises(ValueError, match="the eager contract is transformers'"):
    apply(v4, mode=Mode(contract="eager"))


@pytest.mark.parametrize(
  "field, value",
  [
    ("arithmetic", "quick"),
    ("rounding", "none"),
    ("contract", "B"),
    ("activations", "fp8"),
    ("router_dtype", "float16"),
  ],
)
def test_unknown_mode(field, value):
  with pytest.raises(ValueError, match=rf"mode: {field} must be one of .*, got {value!r}\."):
    Mode(**{field: value})


def test_other_records_that_make_no_sense():
  with pytest.raises(ValueError, match="float32 rounding needs fast arithmetic"):
    Mode(rounding="float32")
  for wrong in ("none", -1, 1.0):
    with pytest.raises(ValueError, match='logits must be a token of the call or "last", got'):
      Taps(logits=wrong)
  with pytest.raises(ValueError, match="logits from token 64 on, of a call of"):
    tiny.call(tiny.tiny("olmoe"), TOKENS[:1, :2], empty(tiny.tiny("olmoe")), taps=Taps(logits=64))
  with pytest.raises(ValueError, match=r"batch and length must be at least 1, got 0, 3"):
    tiny.tiny("olmoe").module.init_state(0, 3)
  with pytest.raises(TypeError, match=r"execution: [a-z_]+ must be int32, got float32"):
    apply(tiny.tiny("olmoe"), execution=Execution(codes=jnp.zeros(1)))


def test_execution_check():
  check = lambda **parts: Execution(**parts).check(top_k=3, num_experts=5)
  pins = lambda ids: Pins(jnp.int32(ids), jnp.ones(3), jnp.arange(3), jnp.bool_(True))
  mask = np.array([True, True, False, False, False])
  for parts, message in (
    (dict(codes=np.int32([6])), r"a contract code is outside -1 \.\. 5"),
    (dict(codes=np.int32([-2])), r"a contract code is outside -1 \.\. 5"),
    (dict(orders=np.int32([[0, 1, 1]])), r"an order is not a permutation of 0 \.\. 2"),
    (dict(pins=pins([0, 1, 5])), r"a pinned id is outside 0 \.\. 4"),
    (dict(expert_mask=mask), "expert_mask leaves 2 experts, fewer than 3"),
  ):
    with pytest.raises(ValueError, match=message):
      check(**parts)
  check(
    codes=np.int32([-1, 5]),
    orders=np.int32([[2, 0, 1], [-1, -1, -1]]),
    pins=pins([-1, 0, 4]),
    expert_mask=~mask,
  )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_configs_that_are_refused(family):
  fields = tiny.FIELDS[family]
  for name in ("hidden_size", "num_experts_per_tok", "max_position_embeddings"):
    with pytest.raises(ValueError, match=rf"config\.json: field {name} is missing"):
      config_from_hf({key: value for key, value in fields.items() if key != name})
  for change, message in (
    (dict(model_type="mamba"), "unknown model_type 'mamba', expected one of deepseek, "),
    (dict(num_experts_per_tok=99), r"top_k 99 is not within 1 \.\. "),
    (dict(num_hidden_layers=0), "num_layers must be at least 1"),
    (dict(num_attention_heads=3, num_key_value_heads=2), "3 query heads are not a multiple of 2"),
  ):
    with pytest.raises(ValueError, match=message):
      config_from_hf(fields | change)


def test_values_that_this_code_does_not_compute():
  for family, change, message in (
    ("olmoe", dict(attention_bias=True), "attention_bias = True is not supported, expected False"),
    ("olmoe", dict(rope_scaling=dict(type="linear", factor=2)), "rope_type 'linear'"),
    ("qwen3_moe", dict(use_sliding_window=True), "use_sliding_window is not supported"),
    ("mixtral", dict(sliding_window=8), "sliding_window = 8 is not supported, expected 256"),
    ("deepseek", dict(scoring_func="sigmoid"), "expected 'softmax'"),
    ("deepseek_v4", dict(scoring_func="softmax"), "expected 'sqrtsoftplus'"),
    ("deepseek_v4", dict(layer_types=["sliding_attention"] * 3), "3 layer types for 4 layers"),
    ("deepseek_v4", dict(layer_types=["full_attention"] * 4), "unknown layer type"),
    ("deepseek_v4", dict(layer_types=None, compress_ratios=[0, 4, 8, 4]), "0, 4 or 128, got 8"),
  ):
    with pytest.raises(ValueError, match=message):
      config_from_hf(tiny.FIELDS[family] | change)


def test_executions_that_do_not_broadcast():
  model = tiny.tiny("olmoe")
  layers, top_k = model.config.num_layers, model.config.top_k
  for execution, detail in (
    (
      Execution(codes=jnp.zeros((layers + 1, 1, 1), jnp.int32)),
      rf"\({layers + 1}, 1, 1\) does not",
    ),
    (Execution(orders=jnp.zeros((1, 1, 1, top_k + 1), jnp.int32)), "does not broadcast to"),
  ):
    with pytest.raises(ValueError, match=detail):
      apply(model, execution=execution)
