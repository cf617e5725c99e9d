"""Where each parameter stands in a published checkpoint: the seam between models and files.

A family lists one `Tensor` per parameter. Matrices are stored [out, in] in files and kept [in, out]
here, as the canonical dot wants them; the experts of a layer, and the gate and up projections of a
gated MLP, are many tensors in most files and one parameter here.
"""

import dataclasses

# A piece is named by alternatives, tried in order: files of several writers are accepted.
Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One parameter and the tensors of a file that make it.

  With every piece a matrix [out, in], the parameter is

      stack over e of (concatenation over j of pieces[e][j] along out), transposed: [E, in, out]

  Attributes:
    path: keys into the parameter tree, below "params".
    shape: of the parameter.
    pieces: names by stacked and concatenated index; one piece of one name for most parameters.
    stacked: whether the parameter has the leading axis E; without it there is one e.
    transposed: whether the last two axes of a piece are swapped.
    split: the number of equal parts into which the out axis of a single piece is cut and stacked
      (the grouped output projection of DeepSeek-V4).
    fused: names of one tensor [E, out, in] which holds all pieces, concatenated and stacked.
    dtype: "weight" for the checkpoint's own, "float32" for what the family keeps there whatever the
      file says, "int32" for tables.
    optional: a checkpoint may lack it, and the parameter is then zero.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  pieces: tuple[tuple[Names, ...], ...]
  stacked: bool = False
  transposed: bool = False
  split: int = 1
  fused: Names = ()
  dtype: str = "weight"
  optional: bool = False


def vector(path, shape, *names: str, dtype="weight", optional=False) -> Tensor:
  """A parameter stored as it is."""
  return Tensor(path, shape, ((names,),), dtype=dtype, optional=optional)


def matrix(path, shape, *names: str, dtype="weight") -> Tensor:
  """A projection [in, out], stored [out, in]."""
  return Tensor(path, shape, ((names,),), transposed=True, dtype=dtype)


def gated(path, width: int, inner: int, gate: Names, up: Names, down: Names) -> list[Tensor]:
  """A gated MLP: gate and up projection in one matrix [D, 2F], and the down projection [F, D]."""
  return [
    Tensor((*path, "gate_up"), (width, 2 * inner), ((gate, up),), transposed=True),
    Tensor((*path, "down"), (inner, width), ((down,),), transposed=True),
  ]


def experts(path, num: int, width: int, inner: int, name, fused: tuple[Names, Names]):
  """Gated MLPs of all experts: [E, D, 2F] and [E, F, D].

  Args:
    path: of the layer's MoE.
    num, width, inner: E, D, F.
    name: function of (expert, "gate" | "up" | "down") → names of that matrix.
    fused: names of the two tensors that hold all experts.
  """
  gate_up = tuple((name(e, "gate"), name(e, "up")) for e in range(num))
  down = tuple((name(e, "down"),) for e in range(num))
  return [
    Tensor((*path, "gate_up"), (num, width, 2 * inner), gate_up, True, True, fused=fused[0]),
    Tensor((*path, "down"), (num, inner, width), down, True, True, fused=fused[1]),
  ]
