"""Files that users bring: what is wrong is said in one sentence."""

import numpy as np
import pytest

from moejax.report import arrays


def test_terms_come_back_as_they_were(tmp_path):
  terms = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
  np.savez(tmp_path / "terms.npz", terms=terms)
  assert (arrays.load_terms(tmp_path / "terms.npz") == terms).all()


@pytest.mark.parametrize(
  "make,message",
  [
    (lambda p: p.write_bytes(b"PK\x03\x04 not really"), "not a readable .npz archive"),
    (lambda p: p.write_bytes(b""), "not a readable .npz archive"),
    (lambda p: truncated(p), "not a readable .npz archive"),
    (lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), "not a readable .npz archive"),
    (lambda p: None, "no such file"),
    (lambda p: np.savez(p, other=np.ones(3)), "no array named 'terms'"),
    (
      lambda p: np.savez(p, terms=np.ones((2, 3))),
      r"terms must be float32 \[K, H\], got float64 \(2, 3\)",
    ),
    (lambda p: np.savez(p, terms=np.array([{}], object)), "not a readable .npz archive"),
  ],
)
def test_bad_files_get_one_sentence(tmp_path, make, message):
  path = tmp_path / "terms.npz"
  make(path)
  with pytest.raises(ValueError, match=message):
    arrays.load_terms(path)


def truncated(path):
  np.savez(path, terms=np.ones((200, 300), np.float32))
  path.write_bytes(path.read_bytes()[:5000])
