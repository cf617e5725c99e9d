"""What order does a real collective add in? XLA's all-reduce over CPU devices, against its models.

    python -m experiments.reduction.collective TERMS.npz RESULT.npz

In a process of its own, which needs as many devices as there are ranks. Each rank adds the terms it
owns in FP32, then `lax.psum` joins the ranks; used by `topologies`.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

RANKS = (2, 4, 8)
_ROOT = pathlib.Path(__file__).parents[2]
_MODULE = "experiments.reduction.collective"


def main(terms_path: str, result_path: str) -> None:
  """Sums partial sums float32 [ranks, H] of every number of ranks, in both dtypes."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import Mesh, PartitionSpec

  found = {}
  with np.load(terms_path) as given:
    for name in given:
      parts = given[name]
      mesh = Mesh(np.array(jax.devices()[: len(parts)]), ("rank",))
      for dtype in (jnp.float32, jnp.bfloat16):
        reduce = jax.shard_map(
          lambda x: jax.lax.psum(x, "rank"),
          mesh=mesh,
          in_specs=PartitionSpec("rank"),
          out_specs=PartitionSpec(),
        )
        total = jax.jit(reduce)(jnp.asarray(parts, dtype))
        found[f"{name}/{jnp.dtype(dtype).name}"] = np.asarray(total.astype(jnp.float32)).reshape(-1)
  np.savez(result_path, **found)


def all_reduce(partial_sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """float32 [H] by "name/dtype" of partial sums float32 [ranks, H] by name."""
  with tempfile.TemporaryDirectory() as folder:
    paths = [str(pathlib.Path(folder) / name) for name in ("terms.npz", "result.npz")]
    np.savez(paths[0], **partial_sums)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(RANKS)}"
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(
      [sys.executable, "-m", _MODULE, *paths],
      env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path},
      check=True,
      stderr=subprocess.PIPE,
    )
    with np.load(paths[1]) as found:
      return dict(found)


if __name__ == "__main__":
  main(*sys.argv[1:])
