"""When several causes contribute: the first is the one whose removal alone makes the step finite.

Decided by experiment. The values born at a place are replaced by finite ones as they are born; if the step is finite
then, that place explains it. If not, what remains has a birth of its own, and the same is asked of that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from whynan.capsule.sites import Site, resolve
from whynan.causes.catalogue import Finding, Rule, Scene
from whynan.causes.source import Expression
from whynan.records import Phase, Remedy, Span, number
from whynan.trace.birth import Birth
from whynan.trace.mending import Place, Remains, places_of, remaining_birth, without

_SETTLED = ("WN601", "WN602", "WN603", "WN604", "WN605", "WN606", "WN608", "WN703", "WN801", "WN802", "WN803")


@dataclass(slots=True)
class Verdict:
    """What is said of one birth."""

    scene: Scene
    rule: Rule
    finding: Finding
    site: Site | None
    expression: Expression | None
    samples: list[int]
    remedies: list[Remedy]
    alone: bool = True  # no second place was found that the step also depends on

    @property
    def healed(self) -> bool:
        """Whether a remedy tried at this place made the step finite."""
        return any(r.result == "proven" for r in self.remedies)

    @property
    def proven(self) -> bool:
        """Whether the cause counts as proven."""
        return self.healed or (self.finding.proven and self.alone)


def decide(first: Verdict, explain: Callable[[Scene], Verdict]) -> Verdict:
    """Return the verdict whose removal alone makes the step finite; a second place is told beside it.

    Cost: nothing where a remedy already made the step finite; otherwise one replay, and up to nine where there is
    a second place.
    """
    birth = first.scene.birth
    if birth is None or first.healed or not _open(first, birth):
        return first
    try:
        return _decide(first, birth, explain)
    except MemoryError:
        return first


def _open(first: Verdict, birth: Birth) -> bool:
    """Whether there is something to decide: a birth inside the step that a replay shows exactly."""
    if birth.error is not None or not birth.exact or birth.phase is Phase.OPTIMIZER or first.rule.code in _SETTLED:
        return False
    inside = birth.leaf is None or birth.leaf.role == "input"
    return inside and first.scene.symptom.place in ("loss", "gradient", "buffer")


def _decide(first: Verdict, birth: Birth, explain: Callable[[Scene], Verdict]) -> Verdict:
    remains = _without(first.scene, birth)
    if remains.finite:
        _explains_all(first, birth, remains)
        return first
    other = remaining_birth(first.scene.program, first.scene.targets, places_of(birth), remains)
    if other is None or _line(other) == _line(birth) or not _line(other).known:
        return first
    second = explain(replace(first.scene, birth=other))
    if other.phase is Phase.BACKWARD and first.scene.symptom.place == "loss":
        return _both(first, birth, second, other)  # no derivative makes a loss bad, even where its remedy mends both
    if second.healed or _without(second.scene, other).finite:
        second.finding.evidence.append(f"{_named(first, birth)} gives non-finite values too, but mending it alone leaves the step as it is")
        return second
    return _both(first, birth, second, other)


def _without(scene: Scene, *births: Birth) -> Remains:
    """Play the step with finite values in place of those born at some places, and write the answer down."""
    places: frozenset[Place] = frozenset().union(*map(places_of, births))
    remains = without(scene.program, scene.targets, places)
    answer = f"loss {number(remains.losses[-1])}" if remains.losses else "finite"
    lines = " and ".join(str(_line(b).line) for b in births)
    scene.tried(f"the step with finite values in place of those born at line {lines}", answer if remains.finite else "still not finite")
    return remains


def _explains_all(first: Verdict, birth: Birth, remains: Remains) -> None:
    """A bad input whose repair makes the step finite is proven; elsewhere the remedies speak for themselves."""
    if birth.leaf is not None and first.rule.code in ("WN701", "WN702"):
        gave = f": loss {number(remains.losses[-1])}" if remains.losses else ""
        first.remedies = [replace(r, result="proven", effect=f"with finite numbers in their place{gave}") for r in first.remedies]


def _both(first: Verdict, birth: Birth, second: Verdict, other: Birth) -> Verdict:
    """Neither is enough alone: tell both places."""
    first.alone = False
    together = _without(first.scene, birth, other)
    place = _named(second, other)
    more = "without both the step is finite" if together.finite else "and they are not the only ones"
    first.finding.evidence.append(f"a second place makes non-finite values of its own: {place}; {more}")
    first.remedies = [r for r in second.remedies if r.result == "proven"] + first.remedies
    spans = {(s.file, s.line) for s in first.finding.spans}
    line = _line(other)
    if (line.file, line.line) not in spans:
        first.finding.spans.append(replace(line, label=f"a second place: {second.finding.label or second.rule.title} ({second.rule.code})"))
    return first


def _line(birth: Birth) -> Span:
    return resolve(birth.site)


def _named(verdict: Verdict, birth: Birth) -> str:
    span = _line(birth)
    return f"{span.file}:{span.line} ({verdict.rule.code}, {verdict.rule.title})"
