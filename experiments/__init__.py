"""Scripts: flags, one call into moejax, rows out.

Run as `python -m experiments.NAME` from a checkout.
"""

import logging

# absl shows what is logged at INFO, where JAX names each kind of accelerator that is not there.
logging.getLogger("jax").setLevel(logging.WARNING)
