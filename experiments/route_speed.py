"""Four runs against the same four runs step by step with PyTorch transformers: a benchmark part.

16 sequences of 256 tokens under a 4-bit KV cache, 64 tokens given and 192 scored. There, they are
decoded token by token with a cache that quantises what is written to it, and forward hooks on the
routers read and impose routes. At batch 1 the four runs follow each other, and routes are kept from
one to the next. A batch of sequences has all four runs as its rows, and routes go from row to row.

Where the machine does other work PyTorch's threads wait for each other at every step, and one of
them is several times as fast as two: OMP_NUM_THREADS=1 is the fair race there.
"""

import time

import numpy as np

import moejax
from moejax import inference
from moejax.data import passages, windows

_SEQUENCES, _TIME, _PREFILL = 16, 256, 64
_ALONE = 2  # sequences that are run at batch 1; the others are taken to need as long
_BATCHES = (8, 16)  # likewise one batch of each
_ROUNDS = 2
_MOEJAX, _BATCH_1 = "moejax", "transformers, batch 1"
_APART = 0.02  # nats that the clean runs of both may differ by, in the mean


def route_part(name: str):
  """Rows of the benchmark for a model; none where transformers is not installed."""
  model = moejax.load(name)
  theirs = Transformers.load(model.directory)
  if theirs is None:
    return
  tokens = windows(passages("calibration"), model.tokenizer, _TIME, num=_SEQUENCES).tokens
  contestants = {
    _MOEJAX: (_SEQUENCES, lambda tokens: four_runs(model, tokens)),
    _BATCH_1: (_ALONE, theirs.alone),
  }
  contestants |= {f"transformers, batches of {size}": (size, theirs.batch) for size in _BATCHES}
  first, _ = _timed(lambda: four_runs(model, tokens))
  for count, run in list(contestants.values())[1:]:
    run(tokens[:count, : _PREFILL + 3])
  times, losses = {label: [] for label in contestants}, {}
  for _ in range(_ROUNDS):
    for label, (count, run) in contestants.items():
      seconds, losses[label] = _timed(lambda count=count, run=run: run(tokens[:count]))
      times[label].append(seconds * _SEQUENCES / count)
  yield from check_losses(model.name, losses, theirs.identity(tokens[:1]))
  case = f"{model.name}, {_SEQUENCES} sequences"
  compiling = 1e3 * (first - np.median(times[_MOEJAX]))
  yield ("route", case, "moejax, first call more", f"{compiling:.4g}", "", "", "", "", "1")
  yield from _rows(case, times, {label: count for label, (count, _) in contestants.items()})


def four_runs(model, tokens: np.ndarray) -> np.ndarray:
  """float32 [4, B, N]: losses of Y_CC, Y_QF, Y_QP and Y_CT with moejax, canonical arithmetic."""
  four = inference.four_run(
    model, tokens, inference.KvQuantization(4), prefill=_PREFILL, controls=0
  )
  return np.stack([four.cc.nll, four.qf.nll, four.qp.nll, four.ct.nll])


def check_losses(name: str, losses: dict[str, np.ndarray], identity: float):
  """Rows that say what the contestants computed, of losses [4, B, N].

  Raises:
    ValueError: clean runs that differ, a cache that changes nothing, or routes that are not those
      imposed: a race between different things would say nothing.
  """
  for label, (cc, qf, *_) in losses.items():
    apart = float(cc.mean() - losses[_MOEJAX][0][: len(cc)].mean())
    damage = float((qf - cc).mean())
    if abs(apart) > _APART or not (qf != cc).any():
      raise ValueError(f"{label}: Y_CC is {apart:.3g} nats off, 4-bit KV does {damage:.3g} nats.")
    found = {"Y_CC": cc.mean(), "Y_CC less moejax's": apart, "Y_QF less Y_CC": damage}
    for what, value in found.items():
      case = f"{name}, {what}, {len(cc)} sequences"
      yield ("route", case, label, "", f"{value:.4f}", "nats", "", "", "")
  if identity > 1e-6:
    raise ValueError(f"transformers: clean routes, imposed, change the loss by {identity:.3g}.")
  case = f"{name}, clean routes imposed"
  yield ("route", case, "transformers", "", f"{identity:.3g}", "nats", "", "", "")


def _rows(case: str, times, counts):
  best = min(list(times)[2:], key=lambda label: np.median(times[label]))
  work = 4 * _SEQUENCES * (_TIME - _PREFILL)
  for label, against in [*((label, _BATCH_1) for label in times), (_MOEJAX, best)]:
    measured = np.array(times[label])
    scaled = "" if counts[label] == _SEQUENCES else f" (of {counts[label]}, scaled)"
    yield (
      "route",
      case,
      label + scaled,
      f"{1e3 * np.median(measured):.4g}",
      f"{work / np.median(measured):.4g}",
      "tokens/s",
      f"{np.median(np.array(times[against]) / measured):.3g}",
      against,
      str(len(measured)),
    )


def _timed(run):
  start = time.perf_counter()
  result = run()
  return time.perf_counter() - start, result


class Transformers:
  """A model in BF16 with its cache, whose routers say what they are told to."""

  def __init__(self, model):
    self._model, self._route = model, None
    for layer in model.model.layers:
      if hasattr(layer.mlp, "gate"):  # a dense layer has none
        layer.mlp.gate.register_forward_hook(self._steer)

  @classmethod
  def load(cls, directory) -> "Transformers | None":
    """The model of a checkpoint; None where transformers is not installed."""
    try:
      import torch
      import transformers
    except ImportError:
      return None
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return cls(model.eval())

  def alone(self, tokens: np.ndarray) -> np.ndarray:
    """float32 [4, B, N]: losses of int [B, T + 1] sequences, one at a time, run after run."""
    self._model.set_experts_implementation("batched_mm")  # the fastest at one token

    def four(row):
      clean, disturbed = [], []
      cc = self._decode(row, None, _keep(clean))
      qf = self._decode(row, slice(None), _keep(disturbed))
      qp = self._decode(row, slice(None), _impose(clean))
      return np.stack([cc, qf, qp, self._decode(row, None, _impose(disturbed))])

    return np.concatenate([four(row[None]) for row in tokens], axis=1)

  def batch(self, tokens: np.ndarray) -> np.ndarray:
    """Those losses again, of all sequences and all four runs in one batch."""
    import torch

    self._model.set_experts_implementation("grouped_mm")  # the fastest at many
    size = len(tokens)

    def copy(*routes):
      return tuple(torch.cat([x[: len(x) // 2]] * 2) for x in routes)  # CC, QF to QP, CT

    losses = self._decode(np.tile(tokens, (4, 1)), slice(size, 3 * size), copy)
    return losses.reshape(4, size, -1)

  def identity(self, tokens: np.ndarray) -> float:
    """The largest change of the clean loss when its own routes are imposed."""
    clean = []
    cc = self._decode(tokens, None, _keep(clean))
    return float(np.abs(self._decode(tokens, None, _impose(clean)) - cc).max())

  def _decode(self, tokens, disturbed, route) -> np.ndarray:
    """float32 [B, N], nats.

    Args:
      tokens: int [B, T + 1].
      disturbed: slice of the rows whose cache is quantised, or None.
      route: function of (weights, ids) that every router has chosen to those that are used.
    """
    import torch
    from torch.nn import functional
    import transformers

    ids, self._route = torch.from_numpy(tokens).long(), route
    cache = transformers.DynamicCache(config=self._model.config)
    if disturbed is not None:
      _quantize_writes(cache, disturbed)
    losses, read = [], ids[:, :_PREFILL]
    with torch.inference_mode():
      for at in range(_PREFILL, ids.shape[1]):
        out = self._model(read, cache=cache, use_cache=True, logits_to_keep=1)
        logits, target = out.logits[:, -1].float(), ids[:, at]
        losses.append(functional.cross_entropy(logits, target, reduction="none"))
        read = target[:, None]
    return torch.stack(losses, dim=1).numpy()

  def _steer(self, gate, args, out):
    logits, weights, ids = out
    return logits, *self._route(weights, ids)


def _keep(routes: list):
  """Leaves routes as they are and adds them to a list."""

  def route(*chosen):
    routes.append(chosen)
    return chosen

  return route


def _impose(routes: list):
  """Replaces routes by those of a list, in order."""
  left = iter(routes)
  return lambda *chosen: next(left)


def _quantize_writes(cache, rows: slice) -> None:
  """Makes a cache quantise some rows of what is written to it; the model then reads that back."""
  write = cache.update

  def update(keys, values, *args, **kwargs):
    for x in (keys, values):
      x[rows] = quantize(x[rows])
    return write(keys, values, *args, **kwargs)

  cache.update = update


def quantize(x):
  """A tensor on the grid of delta = max|x| / 7 of each slice of the last axis, in its own dtype."""
  import torch

  x32 = x.float()
  # A slice of zeros stays one. Level -8 is never reached, so that nothing is clipped.
  delta = (x32.abs().amax(-1, keepdim=True) / 7).clamp_min(torch.finfo(torch.float32).tiny)
  return ((x32 / delta).round() * delta).to(x.dtype)
