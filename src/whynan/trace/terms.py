"""The terms a loss is the sum of: found by walking back from it through sums and fixed factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whynan.capsule.sites import Site
from whynan.trace.graph import Graph, Op
from whynan.trace.slicing import base

MOST = 64  # scalars looked at
_SUMS = ("add", "add_", "sub", "sub_", "rsub")
_PRODUCTS = ("mul", "mul_", "div", "div_")
_FACTORS = (*_PRODUCTS, "neg", "_to_copy", "clone", "view", "_unsafe_view", "squeeze", "unsqueeze", "select", "alias")
_REDUCTIONS = ("sum", "mean")
_JOINS = ("stack", "cat")


@dataclass(frozen=True, slots=True)
class Term:
    """One scalar that goes into a loss, where it does, and what it is itself made of."""

    index: int  # of the operation that made it
    site: Site | None = None  # where it is added or weighted
    operand: int = 0  # which operand it is there
    parts: tuple[Term, ...] = ()

    def all(self) -> Iterator[Term]:
        """Yield the term and its parts."""
        yield self
        for part in self.parts:
            yield from part.all()


def terms_of(graph: Graph, loss: int) -> Term | None:
    """Return the tree of scalars that a loss is made of by sums and fixed factors; nothing where it is no sum."""
    if loss < 0 or graph.ops[loss].backward:
        return None
    tree = _tree(graph, graph.ops[loss], None, 0, [MOST])
    return tree if any(len(term.parts) > 1 for term in tree.all()) else None


def _tree(graph: Graph, op: Op, site: Site | None, operand: int, left: list[int]) -> Term:
    left[0] -= 1
    inner = _inner(graph, op) if left[0] > 0 else []
    through = base(op) in (*_SUMS, *_PRODUCTS)
    parts = [_tree(graph, made, op.site if through else site, place if through else operand, left) for place, made in inner]
    return Term(op.index, site, operand, tuple(parts))


def _inner(graph: Graph, op: Op) -> list[tuple[int, Op]]:
    """Return the operands that an operation adds up or scales; nothing where it is a term itself."""
    name = base(op)
    made = [(n, graph.ops[s.maker]) for n, s in enumerate(op.sources) if s.maker >= 0]
    if name in _SUMS:
        return [(n, m) for n, m in made if m.node >= 0 or m.damage] if all(_is_scalar(m) for _, m in made) else []  # a fixed number is no term
    if name in _FACTORS:
        learned = [(n, m) for n, m in made if m.node >= 0 and _is_scalar(m)]
        others = [m for _, m in made if m.node >= 0]
        return learned if len(others) == 1 and _is_scalar(op) else []
    if name in _REDUCTIONS and len(made) == 1 and base(made[0][1]) in _JOINS:
        return [(n, graph.ops[s.maker]) for n, s in enumerate(made[0][1].sources) if s.maker >= 0 and graph.ops[s.maker].shape in ((), (1,))]
    return []


def _is_scalar(op: Op) -> bool:
    return not op.shape or all(n == 1 for n in op.shape)


def reached_by(graph: Graph, births: list[Op]) -> set[int]:
    """Return the operations of the forward pass that some of its operations go into."""
    reached = {op.index for op in births}
    for op in graph.ops[min(reached, default=0) :]:
        if not op.backward and any(s.maker in reached for s in op.sources):
            reached.add(op.index)
    return reached
