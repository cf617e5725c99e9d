"""One optimiser step of a language model with routed experts: loss, gradients, balance.

The forward pass is the model's own, in fast arithmetic. Shapes as in `moejax.models`.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from moejax.models.arithmetic import Fast
from moejax.models.config import Config
from moejax.models.execution import Mode, NATIVE, Taps
from moejax.models.families import family_of
from moejax.models.indexing import take_rows
from moejax.training.recipe import Phase, Recipe

_TAPS = Taps(router_logits=True, ids=True)
_PLAIN = Phase()


def mode_of(rounded: bool) -> Mode:
  """Fast arithmetic, with or without the family's BF16 roundings."""
  return Mode("fast", "reference" if rounded else "float32")


def loss(config: Config, recipe: Recipe, params, tokens, phase: Phase = _PLAIN):
  """The training loss of a batch.

  Args:
    config, recipe: static.
    params: float32 {"params": ...}.
    tokens: int32 [B, T + 1].
    phase: static; roundings are straight-through.

  Returns:
    (loss, metrics): nats per token "nll", "load" [L, E], the share of tokens each expert had times
    E / K (1 is even; 0 in dense layers), and "aux", the mean balance loss.
  """
  model, mode = family_of(config)(config), mode_of(phase.rounded)
  if phase.rounded:
    params = _round_weights(config, params)
  state = model.init_state(tokens.shape[0], tokens.shape[1] - 1, mode)
  logits, _, trace = model.apply(params, tokens[:, :-1], state, NATIVE, mode=mode, taps=_TAPS)
  norm = jax.nn.logsumexp(logits, axis=-1)
  nll = (norm - _at(logits, tokens[:, 1:], config.vocab_size)).mean()
  expert = jnp.arange(config.num_experts, dtype=jnp.int32)[None, None, None, None]
  chosen = (trace["ids"][..., None] == expert).any(axis=3).astype(jnp.float32)  # [L, B, T, E]
  load = chosen.mean(axis=(1, 2)) * (config.num_experts / config.top_k)
  router = trace["router_logits"]
  aux = (load * jax.nn.softmax(router, axis=-1).mean(axis=(1, 2))).sum(axis=-1)
  routed = jnp.asarray(config.moe_layers, jnp.int32)
  aux = aux[routed].mean()
  total = nll + recipe.logit_z_loss * jnp.square(norm).mean()
  if phase.repetition:
    total += recipe.repetition_loss * repetition(logits - norm[..., None], tokens)
  if not has_score_bias(config):
    z = jnp.square(jax.nn.logsumexp(router[routed], axis=-1)).mean()
    total += recipe.aux_loss * aux + recipe.router_z_loss * z
  return total, dict(nll=nll, aux=aux, load=load)


def repetition(log_probabilities, tokens):
  """Unlikelihood of trigrams that were there before (after Welleck et al., 2020), nats per token.

  The mean over tokens of -log(1 - p(c)), c the token that followed when the same two tokens were
  last read in the window, unless it is the right one. Without it small models that are read
  greedily go round in circles.

  Args:
    log_probabilities: float32 [B, T, V].
    tokens: int32 [B, T + 1].
  """
  read, successors = tokens[:, :-1], tokens[:, 1:]
  time, vocab_size = log_probabilities.shape[1:]
  earlier = jnp.tril(jnp.ones((time, time), bool), -1)[None]
  same = (read[:, :, None] == read[:, None]) & earlier
  pair = same & jnp.pad(same[:, :-1, :-1], ((0, 0), (1, 0), (1, 0)))
  place = jnp.arange(time, dtype=jnp.int32)[None, None]
  last = jnp.where(pair, place, -1).max(axis=-1)
  candidate = take_rows(successors[..., None], jnp.maximum(last, 0))[..., 0]
  priced = (last >= 0) & (candidate != successors)
  p = jnp.exp(_at(log_probabilities, candidate, vocab_size))
  return jnp.where(priced, -jnp.log1p(-jnp.minimum(p, 0.999)), 0.0).mean()


def _at(x, index, size: int):
  """x [..., size] at index [...], by comparison: the gradient of a gather is a scatter."""
  here = index[..., None] == jnp.arange(size, dtype=jnp.int32)[None, None]
  return jnp.where(here, x, 0.0).sum(axis=-1)


def has_score_bias(config: Config) -> bool:
  """Whether the family balances its experts by a bias of their scores."""
  return any(t.path[-1] == "router_bias" for t in family_of(config).tensors(config))


def _round_weights(config: Config, params):
  weights = {t.path for t in family_of(config).tensors(config) if t.dtype == "weight"}
  r = Fast(rounding=True).round

  def cast(path, x):
    return r(x) if tuple(entry.key for entry in path) in weights else x

  return {"params": jax.tree_util.tree_map_with_path(cast, params["params"])}


def split(params):
  """(what has gradients, the rest): two trees with None where the other has a leaf."""
  learned = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return (
    jax.tree.map(lambda x: x if learned(x) else None, params),
    jax.tree.map(lambda x: None if learned(x) else x, params),
  )


def join(learned, rest):
  """The inverse of `split`."""
  return jax.tree.map(
    lambda a, b: b if a is None else a, learned, rest, is_leaf=lambda x: x is None
  )


@functools.partial(
  jax.jit,
  static_argnames=("config", "recipe", "phase"),
  donate_argnames=("params", "opt_state"),
)
def step(params, opt_state, tokens, first_step, *, config: Config, recipe: Recipe, phase: Phase):
  """(params, optimizer state, metrics) after a batch.

  Args:
    params: float32 {"params": ...}; given away.
    opt_state: of `recipe.optimizer(first_step)`; given away.
    tokens: int32 [B, T + 1].
    first_step: int32, of the optimizer.
    config, recipe, phase: as in `loss`.
  """
  learned, rest = split(params)
  objective = lambda learned: loss(config, recipe, join(learned, rest), tokens, phase)
  gradients, metrics = jax.grad(objective, has_aux=True)(learned)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's way
    updates, opt_state = recipe.optimizer(first_step).update(
      gradients["params"], opt_state, learned["params"]
    )
  params = join({"params": optax.apply_updates(learned["params"], updates)}, rest)
  return _balance(params, metrics["load"], recipe.bias_rate), opt_state, metrics


def _balance(params, load, rate: float):
  """Moves the score bias of each expert toward even load."""

  def move(path, x):
    names = [entry.key for entry in path]
    if names[-1] != "router_bias":
      return x
    return x + rate * jnp.sign(1.0 - load[int(names[0].removeprefix("layers_"))])

  return {"params": jax.tree_util.tree_map_with_path(move, params["params"])}
