"""What is left to say where every change that was tried failed: general advice, and what does not help."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from whynan.records import Remedy, number

if TYPE_CHECKING:
    from whynan.causes.catalogue import Finding, Rule, Scene

_ADVICE = {
    "WN101": "make the argument positive where it is made, or take the logarithm before anything can round to 0",
    "WN103": "decide where the divisor is made what stands for 0 there",
    "WN104": "find out where both are made why they are 0: weights that begin at 0, a group without members, a padded row",
    "WN106": "decide where the base is made what stands for 0 there",
    "WN107": "keep what this argument is made of away from the edge, by more than the dtype rounds away next to 1 (6e-8 in float32)",
    "WN201": "bring what goes into the exponent to ordinary size: normalise the features, bound it where it is made, or lower the rate",
    "WN501": "keep what this argument is made of away from the edge, or write the formula so that its slope is finite there",
    "WN604": "use float32 weights for the update, or an optimizer whose guard exists in this dtype",
}
_INSTEAD = re.compile(r"^Instead\n(.*?)(?=\.\s|\.$|\n\n)", re.DOTALL | re.MULTILINE)
_TO_ONE = ("acos", "asin", "atanh", "acosh", "erfinv")
_NEAR = 2**-25  # as far from 1 a number is 1 in float32
_BOUNDS = ("clamp", "clamp_max", "clamp_min", "hardtanh", "mul")
_STEPS, _MAKERS = 6, 64  # how far back, and how many operations, a bound is looked for


def where_all_failed(rule: Rule, remedies: list[Remedy], fitting: str = "") -> tuple[list[Remedy], list[str]]:
    """Put advice before changes that are known to fail, that which fits the values or else general advice, and say of each what is wrong with it.

    Nothing where one is left to try, or is right in itself.
    """
    if not remedies or any(r.result != "failed" or r.safe for r in remedies):
        return remedies, []
    found = _INSTEAD.search(rule.page)
    advice = fitting or _ADVICE.get(rule.code) or (" ".join(found[1].split()) if found is not None else "")
    if not advice:
        return remedies, []
    return [Remedy(advice[0].lower() + advice[1:]), *remedies], [f"does not help: {r.title}: {r.effect}" for r in remedies]


def lost_bounds(scene: Scene, rule: Rule, finding: Finding) -> list[str]:
    """Name the numbers next to 1 that were to keep an argument from that edge and are 1 in float32: `x.clamp(max=1 - 1e-9)` bounds nothing."""
    from whynan.capsule.sites import resolve
    from whynan.trace.birth import View, ancestors

    view = scene.birth.forward if scene.birth is not None else None
    if rule.code not in ("WN107", "WN501") or scene.birth is None or view is None or view.name not in _TO_ONE:
        return []
    graph = scene.birth.graph
    makers = [View(graph.ops[i], scene.birth) for i in ancestors(graph, view.op.index, _STEPS, _MAKERS)]
    found: dict[tuple[float, int], str] = {}
    for maker in makers:
        for value in maker.op.scalars.values() if maker.name in _BOUNDS and maker.op.dtype == "float32" else ():
            if isinstance(value, float) and 0 < abs(1 - value) < _NEAR and (span := resolve(maker.site)).known:
                words = f"1 {'-' if value < 1 else '+'} {number(abs(1 - value))} at {span.place}"
                found.setdefault((value, span.line), f"{words} is 1 in float32: as a bound it keeps nothing away from the edge")
    return [words for words in found.values() if words not in finding.evidence][:2]
