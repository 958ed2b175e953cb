"""The program's own guard: it keeps bad values out of the loss, and not out of the gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from whynan.capsule.sites import resolve
from whynan.causes.facts import SELECTS
from whynan.records import Phase, Span, number
from whynan.trace.slicing import base

if TYPE_CHECKING:
    from whynan.causes.catalogue import Scene
    from whynan.trace.birth import Birth
    from whynan.trace.graph import Op

_GUARDS = SELECTS - {"mul", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "min", "max", "amin", "amax", "sort", "topk"}


def kept_out(scene: Scene) -> tuple[list[str], list[Span]]:
    """Say why a loss is finite though values on the way to it are not: what selects others, at its line, and what its gradient of 0 meets on the way back."""
    birth = scene.birth
    if birth is None or birth.op is None or birth.phase in (Phase.BACKWARD, Phase.OPTIMIZER) or scene.symptom.place != "gradient" or scene.jump is not None:
        return [], []
    loss = birth.losses[-1] if birth.losses else math.nan
    guard = _guard(birth) if math.isfinite(loss) and not birth.derivative else None
    span = resolve(guard.site, "this keeps it out of the loss, not out of the gradient") if guard is not None else None
    if guard is None or span is None or not span.known:
        return [], []
    loss /= scene.lab.scale if scene.lab is not None else 1.0
    name, back = base(guard).strip("_"), f"0 * {'nan' if birth.op.damage.nan else 'inf'} is nan"
    return [f"the loss ({number(loss)}) is finite: {name} at line {span.line} does not take these entries; on the way back their gradient is 0, and {back}"], [
        span
    ]


def _guard(birth: Birth) -> Op | None:
    """Return the first operation that is given what came of the birth and whose result is finite."""
    assert birth.op is not None
    reached = {birth.op.index}
    for op in birth.graph.ops[birth.op.index + 1 :]:
        if op.backward or not any(s.maker in reached and s.damage for s in op.sources):
            continue
        if op.damage:
            reached.add(op.index)
        elif base(op).strip("_") in _GUARDS and "float" in op.dtype:
            return op
    return None
