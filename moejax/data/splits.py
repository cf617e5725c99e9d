"""Documents in splits and buckets: by hash, so that a document is always on the same side."""

from collections.abc import Sequence
import hashlib

import numpy as np

from moejax.data.corpus import Document
from moejax.data.evaluation import SPLITS


def split_of(document: Document) -> str:
  """Is "calibration" or "held_out", evenly, by the hash of its text."""
  return SPLITS[hashlib.sha256(document.text.encode()).digest()[0] % len(SPLITS)]


def documents_sha256(documents: Sequence[Document]) -> str:
  """Of texts, in order."""
  whole = hashlib.sha256()
  for document in documents:
    whole.update(hashlib.sha256(document.text.encode()).digest())
  return whole.hexdigest()


def terciles(sources: Sequence[str], lengths: Sequence[int]) -> np.ndarray:
  """int [n], 0 to 2: the third of its source, by length, that each document is in."""
  sources, lengths = np.asarray(sources), np.asarray(lengths)
  out = np.empty(len(lengths), int)
  for source in set(sources.tolist()):
    here = np.flatnonzero(sources == source)
    rank = np.empty(len(here), int)
    rank[np.argsort(lengths[here], kind="stable")] = np.arange(len(here))
    out[here] = rank * 3 // len(here)
  return out
