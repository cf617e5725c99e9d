"""Parts of the benchmark that need a model: prefill, decode, compile time, memory of loading.

Random weights in the sizes of a nano model: 12 layers, hidden 256, 32 experts.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments import timing
from moejax import checkpoints, inference
from moejax.inference.forward import compiled
from moejax.models import (
  Config,
  config_from_hf,
  Execution,
  family_of,
  init_params,
  Mode,
  NATIVE,
  num_parameters,
  Taps,
)

_TIME, _STEPS, _BATCHES = 64, 16, (1, 16, 64)
_LAST = Taps(logits="last")
_SHARED = dict(
  vocab_size=6144,
  hidden_size=256,
  num_hidden_layers=12,
  num_attention_heads=4,
  max_position_embeddings=4096,
  rms_norm_eps=1e-6,
  tie_word_embeddings=False,
  eos_token_id=1,
)
CONFIGS = {
  "deepseek_v4": dict(
    num_key_value_heads=1,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=64,
    sliding_window=64,
    n_routed_experts=32,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=64,
    num_hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=64,
    layer_types=["sliding_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 5,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
  ),
  "olmoe": dict(intermediate_size=64, num_experts=32, num_experts_per_tok=8),
  "qwen2_moe": dict(
    intermediate_size=512,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=128,
    num_experts=32,
    num_experts_per_tok=4,
  ),
  "qwen3_moe": dict(
    intermediate_size=512,
    moe_intermediate_size=64,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=8,
    norm_topk_prob=True,
  ),
  "deepseek": dict(
    intermediate_size=512,
    moe_intermediate_size=64,
    n_routed_experts=32,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
  ),
  "mixtral": dict(intermediate_size=128, num_local_experts=8, num_experts_per_tok=2),
}


def nano_config(family: str) -> Config:
  """12 layers of a family, hidden 256."""
  return config_from_hf({"model_type": family, **_SHARED, **CONFIGS[family]})


def models_part(seconds: float):
  """Prefill and decode: canonical, fast, and transformers on the same BF16 checkpoint."""
  for family in ("deepseek_v4", "olmoe"):
    config = nano_config(family)
    with tempfile.TemporaryDirectory() as folder:
      params = init_params(config, jax.random.key(0))
      checkpoints.save(folder, config, params)
      model, theirs = checkpoints.load(folder), Transformers.load(folder)
    rng = np.random.default_rng(0)
    for batch in _BATCHES:
      tokens = rng.integers(0, config.vocab_size, (batch, _TIME)).astype(np.int32)
      prefills, decodes = {}, {}
      for name in ("canonical", "fast"):
        prefills[name], decodes[name] = ours(model, tokens, Mode(name))
      if theirs:
        prefills["transformers"], decodes["transformers"] = theirs.runs(tokens)
      for label, contestants, count in (
        (f"prefill of {_TIME}", prefills, batch * _TIME),
        (f"{_STEPS} decode steps", decodes, batch * _STEPS),
      ):
        times = timing.compare(contestants, seconds)
        case = f"{family}, batch {batch}, {label}"
        yield from timing.rows_of("models", case, times, "fast", 1e9 * count, "tokens/s")


def ours(model, tokens, mode):
  """(prefill, decode) of moejax as functions without arguments."""
  batch = tokens.shape[0]
  empty = model.module.init_state(batch, _TIME + _STEPS + 1, mode)
  device = jnp.asarray(tokens)

  def prefill():
    return compiled(model.module, model.params, device, empty, NATIVE, mode, _LAST)

  logits, state, _ = prefill()

  def decode():
    return inference.continue_greedily(model, logits[:, 0], state, _STEPS + 1, mode=mode).tokens

  return prefill, decode


class Transformers:
  """PyTorch transformers in BF16, greedy with its cache."""

  def __init__(self, model):
    self._model = model

  @classmethod
  def load(cls, folder: str) -> "Transformers | None":
    """The model of a checkpoint; None where transformers is not installed."""
    try:
      import torch
      import transformers
    except ImportError:
      return None
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return cls(model.eval())

  def runs(self, tokens):
    """(prefill, decode) as functions without arguments."""
    import copy

    import torch

    ids = torch.from_numpy(tokens).long()

    def prefill():
      with torch.inference_mode():
        out = self._model(ids, use_cache=True, logits_to_keep=1)
      return out

    first = prefill()
    cache = getattr(first, "cache", None) or first.past_key_values

    def decode():
      state, logits = copy.deepcopy(cache), first.logits[:, -1]
      with torch.inference_mode():
        for _ in range(_STEPS):
          out = self._model(logits.argmax(-1, keepdim=True), past_key_values=state, use_cache=True)
          logits = out.logits[:, -1]
      return logits.float().numpy()

    return lambda: prefill().logits.float().numpy(), decode


def compile_part(_seconds: float):
  """Seconds to compile one program of each family; the same program then runs every contract."""
  for family in CONFIGS:
    config = nano_config(family)
    module, params = family_of(config)(config), init_params(config, jax.random.key(0))
    for arithmetic in ("canonical", "fast"):
      for batch, length in ((1, 1), (16, 1), (1, _TIME)):
        mode = Mode(arithmetic)
        state = module.init_state(batch, 256, mode)
        tokens = jnp.zeros((batch, length), jnp.int32)
        codes = Execution(codes=jnp.zeros((1, 1, 1), jnp.int32))
        apply = jax.jit(lambda *a, mode=mode: module.apply(*a, mode=mode))
        start = time.perf_counter()
        lowered = apply.lower(params, tokens, state, codes)
        middle = time.perf_counter()
        lowered.compile()
        end = time.perf_counter()
        case = f"{family}, {arithmetic}, batch {batch}, length {length}"
        for step, taken in (("trace and lower", middle - start), ("compile", end - middle)):
          yield ("compile", case, step, f"{1e3 * taken:.4g}", "", "", "", "", "1")


def loading_part(_seconds: float):
  """Peak memory of loading a 2 GB checkpoint in 8 shards, over what the process had before."""
  config = config_from_hf(
    {
      "model_type": "olmoe",
      **_SHARED,
      "hidden_size": 1024,
      "num_hidden_layers": 10,
      "intermediate_size": 1024,
      "num_experts": 30,
      "num_experts_per_tok": 8,
    }
  )
  with tempfile.TemporaryDirectory() as folder:
    write_zeros(config, folder)
    code = f"from experiments import model_speed; model_speed.report_peak({folder!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
  base, peak = map(int, done.stdout.split())
  size = 2 * num_parameters(config)
  ratio = f"{(peak - base) / size:.3f}"
  case = f"{size / 1e9:.2f} GB of parameters"
  yield ("loading", case, "peak memory", "", f"{(peak - base) / 1e9:.3f}", "GB", ratio, "size", "1")


def write_zeros(config: Config, folder: str) -> None:
  """A checkpoint of zeros, 256 MB to a shard."""
  family = family_of(config)
  params: dict = {}
  for tensor in family.tensors(config):
    node = params
    for key in tensor.path[:-1]:
      node = node.setdefault(key, {})
    node[tensor.path[-1]] = jnp.zeros(tensor.shape, jnp.bfloat16)
  tensors, fields = family.tensors(config), family.write_config(config)
  checkpoints.save_params(folder, {"params": params}, tensors, fields, max_shard_bytes=256 * 2**20)


def report_peak(folder: str) -> None:
  """Prints the peak resident bytes before and after loading."""
  jax.block_until_ready(jnp.zeros(()))
  base = resident()
  model = checkpoints.load(pathlib.Path(folder))
  jax.block_until_ready(model.params)
  print(base, resident())


def resident() -> int:
  """Peak resident set of this process, bytes (Linux)."""
  status = pathlib.Path("/proc/self/status").read_text()
  (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
  return 1024 * int(line.split()[1])
