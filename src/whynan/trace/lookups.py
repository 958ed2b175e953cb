"""How a step reads a weight: as a whole, or only the rows that it looks up."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whynan.trace.graph import Graph, Leaf, Op
from whynan.trace.memory import storage_key
from whynan.trace.slicing import HAND_ON, base

_LOOKUPS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_select", "gather", "take")


def is_lookup(op: Op) -> bool:
    """Whether an operation takes rows or entries out of its first argument by their numbers.

    >>> is_lookup(Op(0, "aten.embedding.default", [], {}, None, "", False, -1, "", -1, ""))
    True
    """
    return base(op) in _LOOKUPS


def reads_of(graph: Graph, leaf: Leaf) -> Iterator[Op]:
    """Yield the operations of the forward pass that compute with a leaf, past views and copies of all of it."""
    number = next((-1 - i for i, other in enumerate(graph.leaves) if other is leaf), None)
    handed = {number}
    for op in graph.ops:
        if op.backward or not any(s.maker in handed for s in op.sources):
            continue
        if base(op) in HAND_ON and not is_lookup(op):
            handed.add(op.index)
        else:
            yield op


def only_looked_up(graph: Graph, leaf: Leaf) -> bool:
    """Whether a step takes nothing but rows out of a weight."""
    reads = list(reads_of(graph, leaf))
    return bool(reads) and all(is_lookup(op) and any(s.name in ("weight", "self") and s.damage for s in op.sources) for op in reads)


def infinities_read(graph: Graph, weight: torch.Tensor) -> bool:
    """Whether a step computed with what is infinite in a weight; a lookup did where a bad row is in its result."""
    leaves = [leaf for leaf in graph.leaves if leaf.damage and storage_key(leaf.tensor) == storage_key(weight)]
    reads = [op for leaf in leaves for op in reads_of(graph, leaf)]
    return any(bool(op.damage) if is_lookup(op) else any(s.damage for s in op.sources) for op in reads)
