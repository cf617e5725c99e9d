"""The recorded arrays are whole, consistent and of the weights that are built here.

Under the marker `parity` they are made again, and the code that makes them is checked itself.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors

from tests.references import cases, weights

NAMES = list(cases.CASES)


def parity(test):
  """Warnings of the foreign libraries are theirs."""
  return pytest.mark.parity(pytest.mark.filterwarnings("default")(test))


def of_family(*families):
  return [name for name in NAMES if cases.CASES[name].family in families]


def num_experts(config):
  names = ("num_experts", "num_local_experts", "n_routed_experts")
  return next(config[name] for name in names if name in config)


def test_every_case_is_recorded_and_the_files_are_small():
  files = list(cases.DATA.iterdir())
  assert sorted(file.stem for file in files) == sorted(NAMES)
  assert sum(file.stat().st_size for file in files) <= 3e6


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name):
  case, arrays = cases.CASES[name], cases.reference(name)
  c, (batch, length) = case.config, arrays["tokens"].shape
  experts = len(weights.moe_layers(c))
  routes = (experts, batch, length)
  streams = (c["hc_mult"],) if case.family == "deepseek_v4" else ()
  want = dict(
    tokens=(batch, length),
    moe_layers=(experts,),
    router_logits=(*routes, num_experts(c)),
    ids=(*routes, c["num_experts_per_tok"]),
    weights=(*routes, c["num_experts_per_tok"]),
    margins=routes,
    ties=routes,
    post_block=(batch, length, *streams, c["hidden_size"]),
    logits=(batch, length, c["vocab_size"]),
    nll=(batch, length - 1),
    decode_logits=(batch, length - case.prompt, c["vocab_size"]),
    greedy_ids=(batch, case.new),
    greedy_margins=(batch, case.new),
    weights_sha256=(32,),
  )
  if case.family == "deepseek_v4":
    want["index_ids"] = (2, batch, length, min(c["index_topk"], length // 4))
  assert {key: value.shape for key, value in arrays.items()} == want
  integers = dict.fromkeys(("tokens", "moe_layers", "ids", "greedy_ids", "index_ids"), np.int32)
  dtypes = integers | dict(ties=np.bool_, weights_sha256=np.uint8)
  for key, value in arrays.items():
    assert value.dtype == dtypes.get(key, np.float32), key


@pytest.mark.parametrize("name", NAMES)
def test_routes_are_decided(name):
  case, arrays = cases.CASES[name], cases.reference(name)
  np.testing.assert_array_equal(arrays["moe_layers"], weights.moe_layers(case.config))
  by_table = [weights.is_hash(case.config, layer) for layer in arrays["moe_layers"]]
  margins = arrays["margins"]
  assert np.isnan(margins[by_table]).all()
  decided = np.delete(margins, by_table, axis=0)
  assert (decided[~np.delete(arrays["ties"], by_table, axis=0)] > 0).all()
  assert not arrays["ties"].any()
  ids = arrays["ids"]
  assert (np.diff(ids) > 0).all() and ids.min() >= 0 and ids.max() < num_experts(case.config)
  # Selected logits of a softmax router are the largest.
  if case.family != "deepseek_v4":
    best = np.sort(np.argsort(-arrays["router_logits"])[..., : ids.shape[-1]])
    np.testing.assert_array_equal(ids, best)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_consistent(name):
  case, arrays = cases.CASES[name], cases.reference(name)
  for key, value in arrays.items():
    assert key == "margins" or np.isfinite(value).all(), key
  assert (arrays["weights"] > 0).all()
  if case.family == "deepseek_v4":
    total = case.config["routed_scaling_factor"]
    np.testing.assert_allclose(arrays["weights"].sum(-1), total, rtol=1e-6)
  elif case.config.get("norm_topk_prob", True):
    np.testing.assert_allclose(arrays["weights"].sum(-1), 1, rtol=1e-6)
  else:
    assert (arrays["weights"].sum(-1) < 1).all()
  logits, tokens = arrays["logits"].astype(np.float64), arrays["tokens"]
  scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nll = -np.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1)[..., 0]
  np.testing.assert_allclose(arrays["nll"], nll, atol=1e-5)
  np.testing.assert_allclose(arrays["decode_logits"], logits[:, case.prompt :], atol=1e-4)
  np.testing.assert_array_equal(arrays["greedy_ids"][:, 0], logits[:, case.prompt - 1].argmax(-1))
  assert (arrays["greedy_margins"] > 1e-3).all()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_tokens_are_those_that_were_run(name):
  case, arrays = cases.CASES[name], cases.reference(name)
  np.testing.assert_array_equal(weights.digest(case), arrays["weights_sha256"])
  np.testing.assert_array_equal(weights.tokens(case), arrays["tokens"])


def test_drawn_numbers_are_nearly_normal():
  x = weights.normal(0, "some name", 100, 100)
  assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.02 and 3 < abs(x).max() < 3.5
  assert abs(np.corrcoef(x.ravel(), weights.normal(0, "other name", 100 * 100))[0, 1]) < 0.03


@pytest.mark.parametrize("name", ["olmoe_base", "mixtral_tied", "deepseek_v4_published"])
@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoint_holds_the_tensors(name, shards, tmp_path):
  case = cases.CASES[name]
  weights.write_checkpoint(case, tmp_path, shards)
  assert json.loads((tmp_path / "config.json").read_text()) == case.config
  files = sorted(tmp_path.glob("*.safetensors"))
  assert len(files) == shards
  stored = {file.name: dict(safetensors.deserialize(file.read_bytes())) for file in files}
  index = tmp_path / "model.safetensors.index.json"
  if shards > 1:
    where = json.loads(index.read_text())["weight_map"]
    assert where == {key: file for file, part in stored.items() for key in part}
  else:
    assert not index.exists()
  stored = {key: value for part in stored.values() for key, value in part.items()}
  expected = weights.tensors(case)
  assert sorted(stored) == sorted(expected)
  for key, value in expected.items():
    assert tuple(stored[key]["shape"]) == value.shape
    dtype = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}[stored[key]["dtype"]]
    np.testing.assert_array_equal(
      np.frombuffer(stored[key]["data"], dtype).reshape(value.shape).astype(value.dtype), value
    )


def test_tokenizer_reads_the_text(tmp_path):
  from tokenizers import Tokenizer

  case = cases.CASES["olmoe_text"]
  weights.write_checkpoint(case, tmp_path)
  tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert [tokenizer.encode(case.text).ids] == weights.tokens(case).tolist()
  for text in (case.text, "naïve 東京 \n\t\x00"):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
  assert tokenizer.get_vocab_size() <= case.config["vocab_size"]


@parity
@pytest.mark.parametrize("name", NAMES)
def test_recorded_arrays_are_made_again(name):
  from tests.references import live

  case = cases.CASES[name]
  arrays = live.run_fair(case)
  recorded, again = cases.reference(name), live.record(case, arrays)
  assert recorded.keys() == again.keys()
  for key, value in recorded.items():
    if value.dtype == np.float32:
      # Bit-equal on the same machine; measured 3e-5 between instruction sets, at values of 27.
      np.testing.assert_allclose(again[key], value, rtol=1e-5, atol=5e-5, err_msg=key)
    else:
      np.testing.assert_array_equal(again[key], value, err_msg=key)
  # Decoding takes the decisions of the full pass.
  np.testing.assert_array_equal(arrays["decode_ids"], arrays["ids"][:, :, case.prompt :])


@parity
@pytest.mark.parametrize("name", [n for n in NAMES if n not in of_family("deepseek")])
def test_transformers_reads_every_tensor(name, tmp_path):
  from tests.references import native

  report = native.load_report(weights.write_checkpoint(cases.CASES[name], tmp_path))
  assert report == dict(missing=[], unexpected=[], mismatched=[])


@parity
@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_base")])
def test_bfloat16_is_near_float32(name, tmp_path):
  from tests.references import deepseek_moe, native

  case, exact = cases.CASES[name], cases.reference(name)
  directory, tokens = weights.write_checkpoint(case, tmp_path), weights.tokens(case)
  if case.family == "deepseek":
    runs = [deepseek_moe.run_bfloat16(directory, tokens)]
  else:
    runs = [native.run_bfloat16(directory, tokens, experts) for experts in ("eager", "grouped_mm")]
  for arrays in runs:
    assert np.mean(arrays["ids"] == exact["ids"]) > 0.9
    assert abs(arrays["nll"].mean() - exact["nll"].mean()) < 0.05
    assert abs(arrays["logits"] - exact["logits"]).max() > 0


def ocr2_model(case):
  """The text stack of DeepSeek-OCR-2, DeepSeek-MoE v1 in float32, and the head of a case."""
  import torch
  from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as modeling

  c, tensors = case.config, {k: torch.tensor(v) for k, v in weights.tensors(case).items()}
  same = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers"
    " num_attention_heads num_key_value_heads n_routed_experts num_experts_per_tok rms_norm_eps"
    " max_position_embeddings"
  )
  layers = range(c["num_hidden_layers"])
  sparse = weights.moe_layers(c)
  config = modeling.DeepseekOcr2TextConfig(
    **{key: c[key] for key in same.split()},
    n_shared_experts=c["n_shared_experts"] or 0,
    mlp_layer_types=["sparse" if layer in sparse else "dense" for layer in layers],
    rope_parameters=dict(rope_type="default", rope_theta=c["rope_theta"]),
  )
  config._attn_implementation = config._experts_implementation = "eager"
  state = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
  for layer in sparse:
    prefix = f"layers.{layer}.mlp."

    def stack(name):
      return torch.stack(
        [state.pop(f"{prefix}experts.{e}.{name}.weight") for e in range(c["n_routed_experts"])]
      )

    gate_up = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
    state[prefix + "experts.gate_up_proj"] = gate_up
    state[prefix + "experts.down_proj"] = stack("down_proj")
    if not c["n_shared_experts"]:
      width = c["hidden_size"]
      empty = dict(gate_proj=(0, width), up_proj=(0, width), down_proj=(width, 0))
      state |= {f"{prefix}shared_experts.{k}.weight": torch.empty(v) for k, v in empty.items()}
  model = modeling.DeepseekOcr2TextModel(config).eval()
  model.load_state_dict(state)
  return model, tensors["lm_head.weight"]


@parity
@pytest.mark.parametrize("name", of_family("deepseek"))
def test_deepseek_moe_is_the_text_stack_of_ocr2(name):
  import torch

  from tests.references import live

  case = cases.CASES[name]
  model, head = ocr2_model(case)
  if case.config["norm_topk_prob"]:
    for layer in weights.moe_layers(case.config):
      model.layers[layer].mlp.gate.register_forward_hook(
        lambda module, args, out: (out[0], out[1] / (out[1].sum(-1, keepdim=True) + 1e-20), out[2])
      )
  with torch.inference_mode():
    states = model(torch.tensor(weights.tokens(case)).long()).last_hidden_state
    logits = (states @ head.T).numpy()
  np.testing.assert_allclose(logits, live.run(case)["logits"], rtol=1e-5, atol=5e-5)
