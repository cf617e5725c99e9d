"""Training state: the last one comes back, bit for bit, and only to the run it is of."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.checkpoints import restore_latest, save_training


def state(seed=0):
  rng = np.random.default_rng(seed)
  params = {"a": jnp.asarray(rng.standard_normal((3, 2)).astype(np.float32))}
  return {
    "params": params,
    "optimizer": optax.adamw(1e-3).init(params),
    "half": jnp.asarray(rng.standard_normal(5).astype(jnp.bfloat16)),
    "key": jax.random.key_data(jax.random.key(seed)),
    "tokens": jnp.int32(seed),
  }


def assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_latest_comes_back_and_two_are_kept(tmp_path):
  for step in (1, 5, 20):
    save_training(tmp_path / "run", step, state(step))
  step, tree = restore_latest(tmp_path / "run", state())
  assert step == 20
  assert_equal(tree, state(20))
  assert sorted(os.listdir(tmp_path / "run")) == ["20", "5"]


def test_nothing_saved(tmp_path):
  assert restore_latest(tmp_path / "run", state()) is None
  assert restore_latest(tmp_path, state()) is None
  assert not os.listdir(tmp_path)


def test_a_step_that_is_not_after_the_last(tmp_path):
  save_training(tmp_path, 5, state())
  for step in (5, 3):
    with pytest.raises(ValueError, match=rf"step {step} is not after 5, the last one saved"):
      save_training(tmp_path, step, state())


def test_a_kill_while_writing_leaves_the_old_state(tmp_path, monkeypatch):
  save_training(tmp_path, 1, state(1))
  with monkeypatch.context() as patch:

    def rename(*_):
      raise KeyboardInterrupt("killed")

    patch.setattr(os, "rename", rename)
    patch.setattr(os, "replace", rename)
    with pytest.raises(KeyboardInterrupt, match=r"killed"):
      save_training(tmp_path, 2, state(2))
  step, tree = restore_latest(tmp_path, state())
  assert step == 1
  assert_equal(tree, state(1))
  save_training(tmp_path, 2, state(2))
  assert restore_latest(tmp_path, state())[0] == 2
  assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.parametrize(
  "change,message",
  [
    ({"more": jnp.zeros(2)}, r"more is nothing, expected float32 \(2,\)"),
    ({"half": jnp.zeros(4, jnp.bfloat16)}, r"half is bfloat16 \(5,\), expected bfloat16 \(4,\)"),
    ({"tokens": jnp.float32(0)}, r"tokens is int32 \(\), expected float32 \(\)"),
    ({"optimizer": ()}, r"optimizer/0/count is int32 \(\), expected nothing"),
  ],
)
def test_another_structure_is_refused(tmp_path, change, message):
  save_training(tmp_path, 1, state())
  with pytest.raises(ValueError, match=rf"the saved state is not of this run: {message}"):
    restore_latest(tmp_path, {**state(), **change})
