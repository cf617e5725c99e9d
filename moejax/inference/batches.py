"""Prompts as arrays: int32 [B, T], short rows padded at their end with -1."""

from collections.abc import Sequence

import numpy as np

PADDING = -1

# States are made for a multiple of this many positions, so that few lengths are compiled.
_STATE_STEP = 64


def pad(prompts: Sequence[Sequence[int]], multiple: int = 1) -> np.ndarray:
  """Rows of token ids as int32 [B, T], T the longest rounded up to a multiple."""
  longest = max(map(len, prompts))
  out = np.full((len(prompts), -(-longest // multiple) * multiple), PADDING, np.int32)
  for row, prompt in zip(out, prompts):
    row[: len(prompt)] = prompt
  return out


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
  """Refuses a batch without prompts, an empty one, and ids that are not in the vocabulary."""
  if not len(prompts):
    raise ValueError("no prompt: expected at least one.")
  for index, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f"prompt {index} is empty: expected at least one token.")
    bad = [token for token in prompt if not 0 <= token < vocab_size]
    if bad:
      raise ValueError(
        f"prompt {index}: token id {bad[0]} is outside the vocabulary of {vocab_size}."
      )


def state_length(num_tokens: int) -> int:
  """Positions to make a state for; bits do not depend on them."""
  return -(-num_tokens // _STATE_STEP) * _STATE_STEP


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
  """How many leading tokens all prompts share."""
  shared = 0
  for column in zip(*prompts):
    if len(set(column)) > 1:
      break
    shared += 1
  return shared
