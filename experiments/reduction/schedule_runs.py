"""Runs in which every combine of every token is summed by one scheme in layer-static orders.

A group is one prompt and one scheme: the native run, the identity order and the schedules of all
request seeds, as rows of one batch.
"""

import dataclasses
import functools
import hashlib

import jax.numpy as jnp
import numpy as np

from experiments.reduction import study as studies
from moejax import combine
from moejax.inference import decode, generate, greedy, prefill
from moejax.inference.batches import state_length
from moejax.inference.trajectory import idle_execution, STEP_TAPS
from moejax.models import Execution, Taps

REQUESTS = 64
TOKENS = 8
NATIVE, IDENTITY, FIRST_SCHEDULE = 0, 1, 2  # rows of a group
_PASS = Taps(ids=True, combined=True)
_STAGES = Taps(combined=True, post_block=True, router_logits=True, ids=True, margins=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """The trajectories of a prompt under a scheme: R rows.

  Attributes:
    tokens: int32 [R, N].
    ids: int32 [L, R, T, K], of every token read, prompt included; -1 in layers without experts.
    changed: bool [L, R, T], whether a bit of the MoE output is not that of the native row.
  """

  tokens: np.ndarray
  ids: np.ndarray
  changed: np.ndarray

  def routes_differ(self, row: int) -> np.ndarray:
    """bool [R]: whether any expert set is not that of a row."""
    return (self.ids != self.ids[:, row : row + 1]).any(axis=(0, 2, 3))

  def tokens_differ(self, row: int) -> np.ndarray:
    """bool [R]: whether the token ids are not those of a row."""
    return (self.tokens != self.tokens[row : row + 1]).any(axis=1)

  def first_route(self, row: int) -> str | None:
    """ "position:layer" of the first expert set that is not the native one."""
    return _first((self.ids[:, row] != self.ids[:, NATIVE]).any(axis=-1))

  def first_bit(self, row: int) -> str | None:
    """ "position:layer" of the first MoE output that is not the native one, bit for bit."""
    return _first(self.changed[:, row])

  def routes_sha256(self, row: int) -> str:
    """Of a row's expert sets, int32 [L, T, K], little endian."""
    return hashlib.sha256(np.ascontiguousarray(self.ids[:, row], "<i4").tobytes()).hexdigest()


def _first(differ: np.ndarray) -> str | None:
  found = np.argwhere(differ.T)  # positions, then layers: as they are computed
  return ":".join(map(str, found[0])) if len(found) else None


def execution(study: studies.Study, scheme: combine.Contract, requests: int) -> Execution:
  """Of the rows of a group."""
  code = np.full(requests + 2, scheme.code, np.int32)
  code[NATIVE] = -1
  return Execution(
    codes=jnp.asarray(code)[None, :, None],
    orders=jnp.asarray(orders(study, requests))[:, :, None],
  )


def orders(study: studies.Study, requests: int) -> np.ndarray:
  """int32 [L, requests + 2, K]: native, identity, then the schedules; the same for all schemes."""
  layers, top_k = study.model.config.num_layers, study.model.config.top_k
  rows = np.empty((layers, requests + 2, top_k), np.int32)
  rows[:, NATIVE], rows[:, IDENTITY] = -1, np.arange(top_k)
  for request in range(requests):
    rows[:, FIRST_SCHEDULE + request] = _schedule(study.seed, request, layers, top_k)
  return rows


@functools.cache
def _schedule(*numbers) -> np.ndarray:
  return combine.schedule(*numbers)


def run_group(study: studies.Study, prompt, scheme: combine.Contract, requests: int) -> Group:
  """Generates, then reads every sequence once more for its routes: the same bits."""
  model, what = study.model, execution(study, scheme, requests)
  ids = study.encode(prompt)
  rows = [ids] * (requests + 2)
  tokens = generate(model, rows, study.horizon or TOKENS, what, mode=study.mode).tokens
  sequences = [[*ids, *row[:-1].tolist()] for row in tokens]
  length = state_length(len(sequences[0]))
  trace = prefill(model, sequences, length, what, mode=study.mode, taps=_PASS)[2]
  read = slice(len(sequences[0]))
  outputs = np.asarray(trace["combined"])[:, :, read].view(np.uint32)
  changed = (outputs != outputs[:, NATIVE : NATIVE + 1]).any(axis=-1)
  return Group(tokens, np.asarray(trace["ids"])[:, :, read], changed)


def last_position(study: studies.Study, prompt, scheme: combine.Contract, requests: int):
  """(logits [R, V], stages by tap name [L, R, ...]) at the last token of a prompt."""
  model, what = study.model, execution(study, scheme, requests)
  ids, rows = study.encode(prompt), requests + 2
  length = state_length(len(ids))
  state = model.module.init_state(rows, length, study.mode)
  if len(ids) > 1:
    state = prefill(model, [ids[:-1]] * rows, length, what, mode=study.mode)[1]
  logits, _, trace = decode(model, [ids[-1]] * rows, state, what, mode=study.mode, taps=_STAGES)
  return np.asarray(logits), {name: np.asarray(x)[:, :, 0] for name, x in trace.items()}


def certified(study: studies.Study, tokens: list[int], scheme: combine.Contract) -> np.ndarray:
  """bool [M, T]: combines of a native run whose every element is proved order-invariant.

  Args:
    tokens: that are read.
    scheme: operand and accumulator that the proof is about.
  """
  terms = native_run(study, tokens, 1)[1]
  routed, time, top_k, width = terms.shape
  contract = study.model.module.contract(study.mode).with_scheme(scheme)
  flat = np.moveaxis(terms, 2, 0).reshape(top_k, -1)
  proved = np.asarray(combine.certify(flat, contract))
  return proved.reshape(routed, time, width).all(axis=-1)


def native_run(study: studies.Study, ids: list[int], num_tokens: int):
  """A prompt and N greedy tokens, one step at a time: by the program that every protocol has.

  Returns:
    (the tokens [N], terms float32 [M, T + N - 1, K, D] of the M routed layers and all that is read)
  """
  model, layers = study.model, list(study.model.config.moe_layers)
  state = model.module.init_state(1, state_length(len(ids) + studies.ROOM), study.mode)
  idle, read, terms, new = idle_execution(model, 1), list(ids), [], []
  for at in range(len(ids) + num_tokens - 1):
    token = [read[at]]
    logits, state, trace = decode(model, token, state, idle, mode=study.mode, taps=STEP_TAPS)
    terms.append(np.asarray(trace["terms"])[layers, 0, 0])
    if at >= len(ids) - 1:
      new.append(int(greedy(logits)[0][0]))
      read.append(new[-1])
  return new, np.stack(terms, axis=1)
