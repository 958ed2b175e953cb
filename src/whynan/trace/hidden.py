"""Infinities that were hidden on the way: `x / inf` is 0 and `tanh(inf)` is 1, and the next operation divides 0 by 0.

Where a birth has finite arguments and one of them was made from an infinity that nobody meant, that infinity is the older birth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whynan.capsule.replay import Program
from whynan.trace.birth import Birth
from whynan.trace.graph import Colour, Graph, Op
from whynan.trace.locate import Targets, birth_in, observe
from whynan.trace.slicing import slice_back

MOST = 5000  # operations that are looked through


def hidden_birth(program: Program, targets: Targets, birth: Birth) -> tuple[Birth, Op] | None:
    """Return the earliest infinity that a birth's arguments were made from, with its values, and the operation that hid it.

    Cost: nothing where there is none; else one replay under a dispatch mode.
    """
    start = birth.forward.op if birth.forward is not None else None
    if start is None or birth.leaf is not None or birth.error is not None:
        return None
    found: dict[int, tuple[Birth, Op]] = {}  # by the number of the operation where one was born
    for hider, maker in _hidden(birth.graph, start):
        older = birth_in(birth.graph, slice_back(birth.graph, [maker]))
        if older.op is not None and not older.op.backward and older.op.site is not None:
            found.setdefault(older.op.index, (older, hider))
    if not found:
        return None
    older, hider = found[min(found)]
    older = replace(older, losses=birth.losses, terms=birth.terms, exact=birth.exact, note=birth.note)
    whole = any(op.backward for op in birth.graph.ops)  # a bad loss was looked for in the forward pass alone
    return observe(program if whole else program.until_loss(), targets, {}, older), hider


def _hidden(graph: Graph, start: Op) -> Iterator[tuple[Op, int]]:
    """Yield the operations before one that took an infinity in and gave finite values, and who made that infinity."""
    seen, waiting = {start.index}, [start]
    while waiting and len(seen) < MOST:
        op = waiting.pop()
        for source in op.sources:
            infinite = source.colour is Colour.DAMAGE and not source.damage.nan
            if infinite and source.maker >= 0 and not op.damage and op is not start:
                yield op, source.maker
            if source.maker >= 0 and source.maker not in seen:
                seen.add(source.maker)
                waiting.append(graph.ops[source.maker])
