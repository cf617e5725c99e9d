"""Shapes of a reduction: sequential, a fixed binary tree, expert-parallel partial sums.

A topology says which operands meet in which add; a contract says how each add rounds. Leaves of a
tree are positions in the order, so that an order still permutes what stands at them.
"""

import dataclasses

Tree = int | tuple["Tree", "Tree"]

ACROSS = ("sequential", "tree", "ring")


@dataclasses.dataclass(frozen=True)
class Topology:
  """How the operands of one combine meet.

  kind "sequential": +0, then one operand after another.
  kind "tree": the nested pairs in `tree`; no +0 is added, so a sum of zeros keeps IEEE's sign.
  kind "expert_parallel": each of `num_ranks` ranks adds the operands it owns, from +0, in order;
    partial sums are rounded to `partial` and then added across ranks: "sequential" by ascending
    rank, "tree" pairwise, or "ring", where the vector is cut into `num_ranks` equal chunks and
    chunk c is added from rank c + 1 round to rank c (the reduce-scatter of a ring all-reduce).
  """

  kind: str = "sequential"
  tree: Tree | None = None
  num_ranks: int = 1
  across: str = "sequential"
  partial: str = "float32"


SEQUENTIAL = Topology()


def fixed_tree(tree: Tree) -> Topology:
  """A given binary tree, e.g. ((0, 1), (2, 3)); its leaves must be 0 .. k-1, once each."""
  found = sorted(leaves(tree))
  if found != list(range(len(found))):
    raise ValueError(f"tree {tree}: leaves must be 0 .. k-1, once each, got {found}.")
  return Topology("tree", tree=tree)


def pairwise(num_terms: int) -> Topology:
  """The balanced tree that halves its range, the larger half first."""
  return Topology("tree", tree=balanced(tuple(range(num_terms))))


def expert_parallel(num_ranks: int, across: str = "sequential", partial: str = "float32"):
  """Partial sums per rank, then across ranks; see `Topology`."""
  if num_ranks < 1:
    raise ValueError(f"expert_parallel: num_ranks must be at least 1, got {num_ranks}.")
  if across not in ACROSS:
    raise ValueError(f"expert_parallel: across must be one of {', '.join(ACROSS)}, got {across!r}.")
  if partial not in ("float32", "bfloat16"):
    raise ValueError(f"expert_parallel: partial must be float32 or bfloat16, got {partial!r}.")
  return Topology("expert_parallel", num_ranks=num_ranks, across=across, partial=partial)


def leaves(tree: Tree) -> list[int]:
  """Leaves from left to right."""
  return [tree] if isinstance(tree, int) else [*leaves(tree[0]), *leaves(tree[1])]


def balanced(items: tuple) -> Tree:
  """Nested pairs over `items`, halved at each level."""
  if len(items) == 1:
    return items[0]
  half = (len(items) + 1) // 2
  return (balanced(items[:half]), balanced(items[half:]))
