"""Strict arithmetic for every test: nothing is promoted, in rank or in dtype, behind its back."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _strict_promotion():
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_numpy_dtype_promotion", "strict")
