"""What is recorded of a model that runs in torch, whoever wrote it.

A runner has `new_cache()`, `step(tokens, cache) -> Step` and `cache_arrays(cache)`; the functions
here drive it through one full pass, teacher-forced decoding and greedy decoding.
"""

import contextlib
import dataclasses

import numpy as np
import torch


@dataclasses.dataclass
class Route:
  """A router's decisions in one call, N = B · T tokens in rows.

  Attributes:
    layer: of the decoder.
    logits: [N, E].
    ids, weights: [N, K], by ascending id.
    margins: [N], weakest selected minus strongest unselected; NaN where a table decides.
    ties: [N], whether the two scores at the boundary are equal.
  """

  layer: int
  logits: torch.Tensor
  ids: torch.Tensor
  weights: torch.Tensor
  margins: torch.Tensor
  ties: torch.Tensor


def route(layer, logits, ids, weights, scores, measure=None) -> Route:
  """A Route from what a router returns.

  Args:
    layer, logits, ids, weights: as in Route, but in the router's order of slots.
    scores: [N, E], what top-k compares, or None where a table decides.
    measure: [N, E], what margins are measured in; the scores if None.
  """
  order = ids.argsort(dim=-1)
  if scores is None:
    margins, ties = torch.full((len(ids),), torch.nan), torch.zeros(len(ids), dtype=torch.bool)
  else:
    margins = _gaps(scores if measure is None else measure, ids)
    ties = _gaps(scores, ids) == 0
  return Route(layer, logits, ids.gather(1, order), weights.gather(1, order), margins, ties)


def _gaps(scores, ids):
  """[N], weakest selected minus strongest unselected."""
  chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
  scores = scores.float()
  weakest = scores.masked_fill(~chosen, torch.inf).amin(-1)
  return weakest - scores.masked_fill(chosen, -torch.inf).amax(-1)


@dataclasses.dataclass
class Step:
  """One call of a model.

  Attributes:
    logits: [B, T, V].
    routes: of the layers with experts.
    blocks: [B, T, D] or [B, T, hc, D] after each layer.
    picks: [B, T, k] of each indexer, ascending; -1 is none.
    pick_margins: the closest decision of each indexer.
  """

  logits: torch.Tensor
  routes: list[Route]
  blocks: list[torch.Tensor]
  picks: list[torch.Tensor] = dataclasses.field(default_factory=list)
  pick_margins: list[float] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def _inference():
  """No gradients; and one thread, so that the order of sums is the same on every machine."""
  threads = torch.get_num_threads()
  torch.set_num_threads(1)
  try:
    with torch.inference_mode():
      yield
  finally:
    torch.set_num_threads(threads)


@_inference()
def trace(runner, tokens: np.ndarray, prompt: int, new: int) -> dict[str, np.ndarray]:
  """Everything, by the names of `cases.reference`.

  post_block is of all layers, [L, B, T, ...]. Besides:

    decode_ids           int32 [Lm, B, T-P, K]
    closest_route, closest_pick, closest_greedy
                         float32, the smallest margin met anywhere: of routers, of indexers, of
                         greedy tokens; inf where there is no such decision
    and the runner's cache after teacher-forced decoding
  """
  tokens = torch.from_numpy(tokens).long()
  full = runner.step(tokens, runner.new_cache())
  out = dict(_one_pass(full, tokens), post_block=_array(torch.stack(full.blocks)))
  if full.picks:
    out["index_ids"] = _array(torch.stack(full.picks))
  steps, cache = _decode(runner, tokens, prompt)
  out["decode_logits"] = _array(torch.cat([step.logits for step in steps[1:]], 1))
  out["decode_ids"] = np.concatenate([_routes(step, tokens)["ids"] for step in steps[1:]], 2)
  out |= runner.cache_arrays(cache)
  ids, margins, greedy_steps = _greedy(runner, tokens[:, :prompt], new)
  out |= dict(greedy_ids=_array(ids), greedy_margins=_array(margins))
  return out | _closest([full, *steps, *greedy_steps], margins)


@_inference()
def logits_and_routes(runner, tokens: np.ndarray) -> dict[str, np.ndarray]:
  """The part of `trace` that is seen in one full pass, for statistics of agreement."""
  tokens = torch.from_numpy(tokens).long()
  return _one_pass(runner.step(tokens, runner.new_cache()), tokens)


@_inference()
def greedy(runner, tokens: np.ndarray, new: int) -> np.ndarray:
  """int32 [B, new], the most probable continuation of tokens [B, T]."""
  return _array(_greedy(runner, torch.from_numpy(tokens).long(), new)[0])


def _one_pass(step: Step, tokens) -> dict[str, np.ndarray]:
  score = torch.log_softmax(step.logits[:, :-1].float(), -1)
  nll = -score.gather(-1, tokens[:, 1:, None])[..., 0]
  return dict(
    tokens=_array(tokens), logits=_array(step.logits), nll=_array(nll), **_routes(step, tokens)
  )


def keys_and_values(layers) -> dict[str, np.ndarray]:
  """keys and values [L, B, Hkv, T, C] from a pair of tensors per layer."""
  keys, values = zip(*layers)
  return dict(keys=_array(torch.stack(keys)), values=_array(torch.stack(values)))


def _routes(step, tokens):
  def stack(field):
    values = torch.stack([getattr(route, field) for route in step.routes])
    return _array(values.reshape(len(values), len(tokens), -1, *values.shape[2:]))

  out = {name: stack(name) for name in ("ids", "weights", "margins", "ties")}
  layers = np.array([route.layer for route in step.routes], np.int32)
  return dict(out, router_logits=stack("logits"), moe_layers=layers)


def _decode(runner, tokens, prompt):
  cache = runner.new_cache()
  steps = [runner.step(tokens[:, :prompt], cache)]
  for t in range(prompt, tokens.shape[1]):
    steps.append(runner.step(tokens[:, t : t + 1], cache))
  return steps, cache


def _greedy(runner, tokens, new):
  cache, ids, margins, steps = runner.new_cache(), [], [], []
  for _ in range(new):
    steps.append(runner.step(tokens, cache))
    best = steps[-1].logits[:, -1].float().topk(2, dim=-1)
    ids.append(best.indices[:, 0])
    margins.append(best.values[:, 0] - best.values[:, 1])
    tokens = ids[-1][:, None]
  return torch.stack(ids, 1), torch.stack(margins, 1), steps


def _closest(steps, greedy_margins):
  routes = torch.cat([route.margins for step in steps for route in step.routes])
  return dict(
    closest_route=np.float32(routes[~routes.isnan()].amin()),
    closest_pick=np.float32(min(m for step in steps for m in [*step.pick_margins, np.inf])),
    closest_greedy=np.float32(greedy_margins.amin()),
  )


def _array(tensor):
  """bool, int32 or float32."""
  if tensor.dtype == torch.bool:
    return tensor.numpy()
  return (tensor.float() if tensor.is_floating_point() else tensor.int()).numpy()
