"""Files that are either whole or not there: written under a temporary name, then renamed."""

import contextlib
import os
import pathlib
import tempfile


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike):
  """Yields a temporary path beside `path` and renames it on success; parents are made."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # The suffix stays, since writers of pictures and archives choose their format by it.
  handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
  os.close(handle)
  try:
    yield pathlib.Path(temporary)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
  finally:
    pathlib.Path(temporary).unlink(missing_ok=True)
