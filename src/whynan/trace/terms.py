"""The terms a loss is the sum of: found by walking back from it through sums and fixed factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    operand: int = 0  # which operand it is there, of those that are tensors
    lone: bool = False  # the only tensor there: `beta * x` and `x * beta` arrive alike
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
    tree = _tree(graph, graph.ops[loss], Term(loss), [MOST])
    return tree if any(len(term.parts) > 1 for term in tree.all()) else None


def _tree(graph: Graph, op: Op, place: Term, left: list[int]) -> Term:
    """Fill in what a term is made of."""
    left[0] -= 1
    elsewhere = place.site is not None and op.site is not None and op.site.code is not place.site.code  # what a function scales is its own affair
    inner = _inner(graph, op) if left[0] > 0 and not (elsewhere and base(op) in _FACTORS) else []
    join = _joined(graph, op)
    at = join or op
    through = join is not None or base(op) in (*_SUMS, *_PRODUCTS)
    lone = len(at.sources) == 1
    places = [Term(m.index, at.site, n, lone) if through else replace(place, index=m.index) for n, m in inner]
    return replace(place, parts=tuple(_tree(graph, made, part, left) for part, (_, made) in zip(places, inner, strict=True)))


def _inner(graph: Graph, op: Op) -> list[tuple[int, Op]]:
    """Return the operands that an operation adds up or scales; nothing where it is a term itself."""
    name = base(op)
    made = _makers(graph, op)
    if name in _SUMS:
        return [(n, m) for n, m in made if m.node >= 0 or m.damage] if all(_is_scalar(m) for _, m in made) else []  # a fixed number is no term
    if name in _FACTORS:
        learned = [(n, m) for n, m in made if m.node >= 0 and _is_scalar(m)]
        others = [m for _, m in made if m.node >= 0]
        blamed = op.damage and not any(m.damage for _, m in learned)  # a term that is bad by what it is divided by
        if name.startswith("div") and len(made) > 1 and learned and base(learned[0][1]) not in (*_SUMS, *_REDUCTIONS):
            return []  # by what is computed here: the quotient is the term, not its numerator
        return learned if len(others) == 1 and _is_scalar(op) and not blamed else []
    join = _joined(graph, op)
    return [(n, m) for n, m in _makers(graph, join) if m.shape in ((), (1,))] if join is not None else []


def _joined(graph: Graph, op: Op) -> Op | None:
    """Return the operation that joins what a sum or mean is taken of."""
    made = _makers(graph, op) if base(op) in _REDUCTIONS else []
    return made[0][1] if len(made) == 1 and base(made[0][1]) in _JOINS else None


def _makers(graph: Graph, op: Op) -> list[tuple[int, Op]]:
    """Return the operations that made the arguments, with their places."""
    return [(n, _itself(graph, graph.ops[s.maker])) for n, s in enumerate(op.sources) if s.maker >= 0]


def _itself(graph: Graph, op: Op) -> Op:
    """See through the copy of its own result that autograd keeps for `sqrt` and `exp`: it comes right after, from the same call."""
    source = op.sources[0].maker if base(op) == "detach" and op.sources else -1
    return graph.ops[source] if source == op.index - 1 >= 0 and graph.ops[source].site == op.site else op


def _is_scalar(op: Op) -> bool:
    return not op.shape or all(n == 1 for n in op.shape)


def reached_by(graph: Graph, births: list[Op]) -> set[int]:
    """Return the operations of the forward pass that some of its operations go into."""
    reached = {op.index for op in births}
    for op in graph.ops[min(reached, default=0) :]:
        if not op.backward and any(s.maker in reached for s in op.sources):
            reached.add(op.index)
    return reached
