"""Whether the rows of a batch are samples: of nodes of a graph, points of one problem or states of a chain none can be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.facts import ELEMENTWISE, VIEWS
from whynan.trace.graph import Leaf
from whynan.trace.slicing import base

if TYPE_CHECKING:
    import torch

    from whynan.trace.birth import Birth
    from whynan.trace.graph import Graph, Op, Source

_PRODUCTS = ("mm", "mv", "addmm", "addmv")
_UNKNOWN = -1
_WEIGHTS = ("parameter", "buffer")


def are_coupled(birth: Birth, size: int) -> bool:
    """Whether a step adds so many rows up with each other, or is handed a table of their pairs: then one of them is no sample that could be left out."""
    graph = birth.graph
    return any(_mixes(graph, op, size) for op in graph.ops if not op.backward) or any(_tells_pairs(leaf, size) for leaf in graph.leaves)


def are_fed(birth: Birth, size: int) -> bool:
    """Whether the modules of a step are given so many rows; so it is where there are none."""
    graph = birth.graph
    fed = {rows for op in graph.ops if op.in_module and not op.backward for s in op.sources for rows in _first_dims(graph, s)}
    return not fed or not fed.isdisjoint((size, _UNKNOWN))


def _shape(graph: Graph, source: Source) -> tuple[int, ...]:
    made = graph.maker(source)
    return made.shape if not isinstance(made, Leaf) else () if made.tensor.is_nested else tuple(made.tensor.shape)


def _mixes(graph: Graph, op: Op, size: int) -> bool:
    """Whether a matrix product makes as many rows of so many rows, which are no weight: each of all of them."""
    if base(op) not in _PRODUCTS or op.shape[:1] != (size,) or size < 2:
        return False
    return _shape(graph, op.sources[-1])[:1] == (size,) and not _is_weight(graph, op.sources[-1])


def _is_weight(graph: Graph, source: Source) -> bool:
    made = graph.maker(source)
    while not isinstance(made, Leaf) and base(made) in VIEWS and made.sources:
        made = graph.maker(made.sources[0])
    return isinstance(made, Leaf) and made.role in _WEIGHTS


def _tells_pairs(leaf: Leaf, size: int) -> bool:
    """Whether a tensor that was handed in says of each pair of rows whether they belong together: an adjacency, a causal mask."""
    table: torch.Tensor = leaf.dense()
    if table.is_nested or table.is_meta or tuple(table.shape) != (size, size) or size < 2 or leaf.role in _WEIGHTS or table.is_complex():
        return False
    on = table != 0
    return bool((~on | (table == 1) | (table == float("-inf"))).all()) and bool(on.any()) and not bool(on.all())


def _first_dims(graph: Graph, source: Source) -> set[int]:
    """Return the first dimensions of what a module is given from outside, and of what that was made of element by element."""
    found: set[int] = set()
    todo, seen = [source], set[int]()
    while todo:
        current = todo.pop()
        made = graph.maker(current)
        if current.maker in seen or (isinstance(made, Leaf) and made.role in _WEIGHTS) or (not isinstance(made, Leaf) and made.in_module):
            continue
        seen.add(current.maker)
        found.update(_shape(graph, current)[:1])
        if not isinstance(made, Leaf) and base(made).endswith("_"):
            found.add(_UNKNOWN)  # it may be a part of the tensor that was written
        elif not isinstance(made, Leaf) and base(made) in ELEMENTWISE:
            todo += [s for s in made.sources if not _is_spread(graph, s, made)]
    return found


def _is_spread(graph: Graph, source: Source, made: Op) -> bool:
    """Whether an argument has no rows of its own: one number for each column is given to every row."""
    return (base(made) not in VIEWS or base(made) == "expand") and len(_shape(graph, source)) < len(made.shape)
