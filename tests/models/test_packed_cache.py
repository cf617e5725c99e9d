"""A packed cache: what is read is what was packed, in any chunks, flushed at the stated times."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax import inference, numerics
from moejax.models import export, Mode, PackedFormat, restore
from tests.models import tiny
from tests.oracles import assert_same_bits, to_bf16

TOKENS = tiny.draw_tokens(2)
LENGTH = 24  # of states
# One of those that share a cache of keys and values, with grouped heads; and DeepSeek-V4, whose
# fits of zero points are long to compile.
FAMILIES = ("qwen3_moe", pytest.param("deepseek_v4", marks=pytest.mark.slow))


def mode(**fields):
  return Mode(packed_kv=PackedFormat(**fields))


def score(model, mode, **more):
  return inference.score(model, TOKENS, mode=mode, **more).nll


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_do_not_matter(family):
  model = tiny.tiny(family)
  packed = mode(bits=4)
  whole = score(model, packed)
  assert_same_bits(score(model, packed, chunk=7), whole)
  assert (whole != score(model, Mode())).any()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_do_not_matter_with_a_window(chunk):
  model, packed = tiny.tiny("olmoe"), mode(bits=2, window=8, prefill=6)
  assert_same_bits(score(model, packed, chunk=chunk), score(model, packed))


def run(model, mode, tokens):
  state = model.module.init_state(len(tokens), LENGTH, mode)
  logits, state, _ = inference.forward(model, tokens, state, mode=mode)
  return np.asarray(logits), state


def test_the_state_holds_the_codes_of_what_is_written():
  """Of the first layer, whose keys do not depend on what was read."""
  model = tiny.tiny("qwen3_moe")
  plain, packed = (run(model, m, TOKENS)[1] for m in (Mode(), mode(bits=3)))
  for name in ("keys", "values"):
    exact = np.asarray(getattr(plain.layers[0], name).astype(np.float32))
    kept = getattr(packed.layers[0], name)
    want = numerics.quantize_packed(exact, 3, exact.shape[-1])
    count = TOKENS.shape[1]
    assert_same_bits(kept.codes[:, :, :count], want.codes[:, :, :count])
    read = np.asarray(numerics.dequantize_packed(kept))[:, :, :count]
    assert_same_bits(read, np.asarray(numerics.dequantize_packed(want))[:, :, :count])
    assert_same_bits(read, to_bf16(read).astype(np.float32))


def test_the_prefill_and_the_window_are_exact_until_a_flush():
  """Logits leave those of a plain cache at the first token that reads a flushed one, not before."""
  model = tiny.tiny("olmoe")
  plain, _ = run(model, Mode(), TOKENS)
  for window, prefill in ((6, 6), (8, 3)):
    found, _ = run(model, mode(bits=2, window=window, prefill=prefill), TOKENS)
    differs = (found != plain).any(axis=(0, 2))
    assert not differs[:prefill].any() and differs[prefill:].any()
    assert differs[prefill]  # the prefix is flushed before the first decoded token
  # Without a prefill nothing is flushed before the window is full.
  found, _ = run(model, mode(bits=2, window=8), TOKENS)
  differs = (found != plain).any(axis=(0, 2))
  assert not differs[:8].any() and differs[8]


def test_a_whole_window_that_is_never_full_changes_nothing():
  model = tiny.tiny("qwen3_moe")
  plain, _ = run(model, Mode(), TOKENS)
  found, _ = run(model, mode(bits=2, window=LENGTH), TOKENS)
  assert_same_bits(found, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_state_is_exported_and_restored(family):
  model, packed = tiny.tiny(family), mode(bits=4)
  tokens = TOKENS[:1]
  _, state = run(model, packed, tokens[:, :11])
  template = model.module.init_state(1, LENGTH, packed)
  again = restore(export(state), template, 11)
  step = lambda state: inference.forward(model, tokens[:, 11:], state, mode=packed)[0]
  assert_same_bits(step(again), step(state))
  assert (state.fingerprints() == again.fingerprints()).all()


def test_memory_is_that_of_codes():
  model = tiny.tiny("olmoe")
  size = lambda mode: sum(
    x.nbytes for x in jax.tree.leaves(model.module.init_state(1, 64, mode).layers)
  )
  plain, c = size(Mode()), model.config
  heads = 2 * c.num_layers * c.num_kv_heads * 64
  assert plain == heads * c.head_dim * 2
  for bits in (4, 2):
    assert size(mode(bits=bits)) == heads * (c.head_dim * bits // 8 + 4)


def test_bad_input():
  with pytest.raises(ValueError, match="a packed cache of 8 bits: expected 2, 3 or 4"):
    PackedFormat(8)
  model = tiny.tiny("olmoe")
  with pytest.raises(ValueError, match="groups of 3 do not divide heads of"):
    model.module.init_state(1, 8, mode(group=3))
  v4 = tiny.tiny("deepseek_v4")
  with pytest.raises(ValueError, match="DeepSeek-V4 has a window of its own"):
    v4.module.init_state(1, 8, mode(window=4))
  with pytest.raises(ValueError, match="another config, batch or mode"):
    state = model.module.init_state(2, LENGTH, Mode())
    inference.forward(model, TOKENS, state, mode=mode())


def test_a_format_is_static():
  assert dataclasses.asdict(mode(bits=3))["packed_kv"]["bits"] == 3
