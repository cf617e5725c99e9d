"""Records what the default suite compares with.

    python -m tests.references.make                      # all cases, 15 seconds on one core
    python -m tests.references.make --cases=olmoe_base   # one of them
    python -m tests.references.make --search             # seeds without close decisions

The same files come out of every run on one machine.
"""

from pathlib import Path

from absl import app, flags, logging
import numpy as np
import transformers

from tests.references import cases, live

_OUT = flags.DEFINE_string("out", str(cases.DATA), "Directory of the npz files.")
_CASES = flags.DEFINE_list("cases", list(cases.CASES), "Names of cases.")
_SEARCH = flags.DEFINE_bool("search", False, "Log a fair seed for each case; write nothing.")


def main(argv):
  del argv
  transformers.utils.logging.disable_progress_bar()
  for name in _CASES.value:
    case = cases.CASES[name]
    if _SEARCH.value:
      logging.info("%s: seed %d", name, live.fair_seed(case))
      continue
    path = Path(_OUT.value) / f"{name}.npz"
    np.savez_compressed(path, **live.record(case, live.run_fair(case)))
    logging.info("%s: %d bytes", path.name, path.stat().st_size)


if __name__ == "__main__":
  app.run(main)
