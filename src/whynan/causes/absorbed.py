"""An overflow of the forward pass that a finite result came of: `1 / cosh(x)` is 0, and only its slope, 0 * inf, is bad."""

from __future__ import annotations

from dataclasses import replace

from whynan.causes.catalogue import Scene, first_match
from whynan.causes.facts import SELECTS
from whynan.trace.birth import Birth, followers
from whynan.trace.graph import Colour, Op
from whynan.trace.locate import birth_in
from whynan.trace.slicing import base, slice_back

_OVERFLOWS = ("WN201", "WN202", "WN203", "WN605")
_POLES = ("WN103", "WN106")


def absorbed(scene: Scene, birth: Birth) -> tuple[Birth, Op] | None:
    """Return the overflow whose slope a bad derivative is, and the operation that made finite values of it.

    A number divided by 0 is one where a function of it took it in: `atan(x / 0)`. An infinity at an edge, log(0), is none: in the forward pass it
    may be meant.
    """
    forward = birth.forward
    if forward is None or not birth.derivative or forward.op.colour is not Colour.DAMAGE or any(s.damage for s in forward.op.sources):
        return None
    hider = _hider(birth, forward.op)
    made = birth_in(birth.graph, slice_back(birth.graph, [forward.op.index]))
    older = replace(birth, op=made.op, slice=made.slice, phase=made.phase)
    return (older, hider) if hider is not None and _is_told(replace(scene, birth=older), hider) else None


def _is_told(scene: Scene, hider: Op) -> bool:
    rule, _ = first_match(scene)
    return rule.code in _OVERFLOWS or (rule.code in _POLES and base(hider).rstrip("_") not in SELECTS)


def _hider(birth: Birth, overflow: Op) -> Op | None:
    """Return the first operation of the forward pass that took an infinity on and gave finite values."""
    ops = birth.graph.ops
    after = (ops[index] for index in followers(birth.graph, overflow.index, depth=12, limit=200))
    return next((op for op in after if not op.damage and any(s.damage for s in op.sources)), None)
