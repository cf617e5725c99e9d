"""Attribution: masks by plain loops, shares in rationals, cancellation by hand."""

from fractions import Fraction

import numpy as np
import pytest

from moejax.analysis import attribution


def test_each_token_is_in_the_mask_of_its_first_reason():
  flips = np.random.default_rng(0).random((5, 7, 11)) < 0.2
  found = attribution.masks(flips)
  for b in range(7):
    for n in range(11):
      if flips[4, b, n]:
        expected = (True, False, False)
      elif any(flips[layer, b, n] for layer in range(4)):
        expected = (False, True, False)
      else:
        expected = (False, False, True)
      assert tuple(mask[b, n] for mask in found) == expected
  assert all(mask.any() for mask in found)


def test_one_layer_has_nothing_upstream():
  flips = np.array([[[True, False]]])
  found = attribution.masks(flips)
  assert [mask.tolist() for mask in found] == [[[True, False]], [[False, False]], [[False, True]]]


def test_shares_of_fractions_are_exact():
  values = np.array([[Fraction(1, 3), Fraction(-1, 7)], [Fraction(2, 5), Fraction(1, 11)]])
  flips = np.array([[[0, 1], [1, 0]], [[1, 0], [0, 0]]], dtype=bool)
  found = attribution.shares(values, attribution.masks(flips))
  total = Fraction(1, 3) - Fraction(1, 7) + Fraction(2, 5) + Fraction(1, 11)
  nonlocal_ = (Fraction(2, 5) - Fraction(1, 7)) / total
  assert found == (Fraction(1, 3) / total, nonlocal_, Fraction(1, 11) / total)
  assert sum(found) == 1 and all(isinstance(share, Fraction) for share in found)


def test_shares_are_of_the_signed_sum():
  kinds = attribution.Partition(*np.eye(3, dtype=bool))
  assert attribution.shares(np.array([3.0, -2.0, 1.0]), kinds) == (1.5, -1.0, 0.5)


def test_shares_of_floats_lose_nothing_to_large_terms():
  values = np.array([1e16, 1.0, -1e16, 1.0])
  jump = np.array([True, True, True, False])
  kinds = attribution.Partition(jump, np.zeros(4, bool), ~jump)
  assert attribution.shares(values, kinds) == (0.5, 0.0, 0.5)


def test_shares_of_floats_sum_to_one():
  rng = np.random.default_rng(1)
  harm = (rng.standard_normal((96, 192)) + 0.01).astype(np.float32)
  found = attribution.shares(harm, attribution.masks(rng.random((4, 96, 192)) < 0.2))
  assert sum(found) == pytest.approx(1, abs=1e-14)


def test_the_tax_of_a_few_flips():
  harm = np.array([[0.5, -0.25, 8.0], [0.25, 0.0, -0.125]])
  flipped = np.array([[True, True, False], [True, True, True]])
  found = attribution.signed_flip_tax(harm, flipped)
  assert found == attribution.FlipTax(
    harmful=0.75,
    beneficial=0.375,
    net=0.375,
    flips=5,
    harmful_flips=2,
    beneficial_flips=2,
    harmful_mean=0.375,
    beneficial_mean=0.1875,
    cancellation=0.5,
  )
  turned = attribution.signed_flip_tax(-harm, flipped)
  assert turned.net == -0.375 and turned.cancellation == 0.5


def test_cancellation_is_of_sums_not_of_means():
  # The conditional means of the paper, 0.2036 and 0.1819, alone would give 0.893.
  harm = np.repeat([0.2036, -0.1819], [100, 101])
  found = attribution.signed_flip_tax(harm, np.ones(201, bool))
  assert found.cancellation == pytest.approx(101 * 0.1819 / (100 * 0.2036))


def test_no_flips_have_neither_means_nor_cancellation():
  found = attribution.signed_flip_tax(np.ones(3), np.zeros(3, bool))
  assert found == attribution.FlipTax(0.0, 0.0, 0.0, 0, 0, 0, None, None, None)
  found = attribution.signed_flip_tax(np.array([2.0]), np.array([True]))
  assert (found.cancellation, found.beneficial_mean) == (0.0, None)


def test_what_is_not_a_partition_is_refused():
  kinds = attribution.masks(np.zeros((2, 3, 4), bool))
  with pytest.raises(ValueError, match=r"sum to zero"):
    attribution.shares(np.zeros((3, 4)), kinds)
  with pytest.raises(ValueError, match=r"each token exactly once"):
    attribution.shares(np.ones((3, 4)), kinds._replace(jump=kinds.pure_flux))
  with pytest.raises(ValueError, match=r"each token exactly once"):
    attribution.shares(np.ones((3, 4)), kinds._replace(pure_flux=kinds.jump))
  with pytest.raises(ValueError, match=r"mask jump must be bool \(4, 3\).*, got bool \(3, 4\)"):
    attribution.shares(np.ones((4, 3)), kinds)


@pytest.mark.parametrize(
  "flips", [np.zeros((2, 3), bool), np.zeros((2, 3, 4)), np.zeros((0, 3, 4), bool)]
)
def test_bad_flips_are_refused(flips):
  with pytest.raises(ValueError, match=r"flips must be bool \[L, B, N\]"):
    attribution.masks(flips)


def test_bad_harm_is_refused():
  with pytest.raises(ValueError, match=r"flipped must be bool \(2,\) as harm, got int64 \(2,\)"):
    attribution.signed_flip_tax(np.ones(2), np.array([0, 1]))
  flipped = np.array([True, False])
  with pytest.raises(ValueError, match=r"harm of a flipped token is NaN"):
    attribution.signed_flip_tax(np.array([np.nan, 1.0]), flipped)
  assert attribution.signed_flip_tax(np.array([1.0, np.nan]), flipped).net == 1.0
