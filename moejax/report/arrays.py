"""Arrays that a user brings in files."""

import zipfile

import numpy as np


def load_terms(path):
  """The array `terms` of an .npz, or one sentence about what is wrong with it."""
  try:
    with open(path, "rb") as file, np.load(file) as archive:
      terms = archive["terms"]
  except KeyError:
    raise ValueError(f"{path}: no array named 'terms' in it.") from None
  except FileNotFoundError:
    raise ValueError(f"{path}: no such file.") from None
  except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path}: not a readable .npz archive ({error}).") from None
  if terms.dtype != np.float32 or terms.ndim != 2 or 0 in terms.shape:
    raise ValueError(f"{path}: terms must be float32 [K, H], got {terms.dtype} {terms.shape}.")
  return terms
