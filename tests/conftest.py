"""Strict arithmetic for every test: nothing is promoted, in rank or in dtype, behind its back."""

import jax
import pytest

from moejax import numerics


@pytest.fixture(autouse=True, scope="session")
def _strict_promotion():
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def each_isa():
  """A function to loop over: every instruction set of this processor in turn, in force."""
  library = numerics.native()

  def isas():
    for isa in library.isas:
      library.force_isa(isa)
      yield isa

  yield isas
  library.force_isa(library.isas[-1])
