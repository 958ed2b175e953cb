"""What is left to say where every change that was tried failed: general advice, and what does not help."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from whynan.records import Remedy, number

if TYPE_CHECKING:
    from whynan.capsule.sites import Site
    from whynan.causes.catalogue import Finding, Rule, Scene

_ADVICE = {
    "WN101": "make the argument positive where it is made, or take the logarithm before anything can round to 0",
    "WN103": "decide where the divisor is made what stands for 0 there: a schedule, a scale or a count must not reach it",
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


def where_all_failed(rule: Rule, remedies: list[Remedy]) -> tuple[list[Remedy], list[str]]:
    """Put general advice before changes that are known to fail, and say of each what is wrong with it.

    Nothing where one is left to try, or is right in itself.
    """
    if not remedies or any(r.result != "failed" or r.safe for r in remedies):
        return remedies, []
    found = _INSTEAD.search(rule.page)
    advice = _ADVICE.get(rule.code) or (" ".join(found[1].split()) if found is not None else "")
    if not advice:
        return remedies, []
    return [Remedy(advice[0].lower() + advice[1:]), *remedies], [f"does not help: {r.title}: {r.effect}" for r in remedies]


def lost_bounds(scene: Scene, rule: Rule, finding: Finding) -> list[str]:
    """Name the numbers next to 1 in the program that are 1 in float32, where an argument has reached that edge: `1 - 1e-9` bounds nothing."""
    from whynan.capsule.sites import resolve

    view = scene.birth.forward if scene.birth is not None else None
    if rule.code not in ("WN107", "WN501") or view is None or view.name not in _TO_ONE or view.op.dtype != "float32":
        return []
    found: dict[tuple[float, int], str] = {}
    for value, site in _numbers(scene):
        if 0 < abs(1 - value) < _NEAR and (span := resolve(site)).known:
            words = f"1 {'-' if value < 1 else '+'} {number(abs(1 - value))} at {span.place}"
            found.setdefault((value, span.line), f"{words} is 1 in float32: as a bound it keeps nothing away from the edge")
    return [words for words in found.values() if words not in finding.evidence][:2]


def _numbers(scene: Scene) -> list[tuple[float, Site | None]]:
    """Return the numbers that the calls since the update before were given, and where."""
    tape = scene.program.recorder.tape
    given = [(v, e.site) for e in tape for v in (*e.args, *e.kwargs.values())]
    given += [(v, op.site) for op in (scene.birth.graph.ops if scene.birth is not None else ()) for v in op.scalars.values()]
    return [(v, site) for v, site in given if isinstance(v, float)]
