"""When several causes contribute: the first is the one whose removal alone makes the step finite.

Decided by experiment. The values born at a place are replaced by finite ones as they are born; if the step is finite
then, that place explains it. If not, what remains has a birth of its own, and the same is asked of that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from whynan.capsule.sites import Site, resolve
from whynan.causes.catalogue import Finding, Rule, Scene
from whynan.causes.jointly import Part, changes_at, together
from whynan.causes.lab import Outcome
from whynan.causes.source import Expression
from whynan.causes.swapping import Swapper
from whynan.records import DAMAGED, Phase, Remedy, Span, number
from whynan.trace.birth import Birth
from whynan.trace.locate import locate
from whynan.trace.mending import Place, Remains, places_of, remaining_birth, without

_SETTLED = (*DAMAGED, "WN604", "WN605", "WN606", "WN703", "WN801", "WN802", "WN803")
_ORDER = ("second", "third", "fourth")
MOST = 1 + len(_ORDER)  # places that are looked for
RUNS = 12  # and how often they may run


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
    without: Outcome | None = None  # what the step gives without its bad samples

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
    a second place; for each further one as many again.
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
    if birth.error is not None or not birth.exact or birth.by_number or birth.phase is Phase.OPTIMIZER or first.rule.code in _SETTLED:
        return False
    inside = birth.leaf is None or birth.leaf.role == "input"
    return inside and first.scene.symptom.place in ("loss", "gradient", "buffer", "parameter")  # the last: a weight that the step itself sets


def _decide(first: Verdict, birth: Birth, explain: Callable[[Scene], Verdict]) -> Verdict:
    remains = _without(first.scene, birth)
    if remains.finite:
        _explains_all(first, birth, remains)
        if not first.healed:
            _look_further(first, explain)
        return first
    other = remaining_birth(first.scene.program, first.scene.targets, places_of(birth), remains)
    if other is None or _line(other) == _line(birth) or not _line(other).known:
        return first
    second = explain(replace(first.scene, birth=other))
    if other.phase is Phase.BACKWARD and first.scene.symptom.place == "loss":
        return _all(first, second, explain)  # no derivative makes a loss bad, even where its remedy mends both
    if second.healed or _without(second.scene, other).finite:
        second.finding.evidence.append(f"{_named(first)} gives non-finite values too, but mending it alone leaves the step as it is")
        return second
    return _all(first, second, explain)


def _without(scene: Scene, *births: Birth) -> Remains:
    """Play the step with finite values in place of those born at some places, and write the answer down."""
    remains = without(scene.program, scene.targets, _places(list(births)))
    answer = f"loss {number(remains.losses[-1])}" if remains.losses else "finite"
    lines = " and ".join(dict.fromkeys(str(_line(b).line) for b in births))
    scene.tried(f"the step with finite values in place of those born at line {lines}", answer if remains.finite else "still not finite")
    return remains


def _explains_all(first: Verdict, birth: Birth, remains: Remains) -> None:
    """A bad input whose repair makes the step finite is proven; elsewhere the remedies speak for themselves."""
    if birth.leaf is not None and first.rule.code in ("WN701", "WN702"):
        gave = f": loss {number(remains.losses[-1])}" if remains.losses else ""
        first.remedies = [replace(r, result="proven", effect=f"with finite numbers in their place{gave}") for r in first.remedies]


def _all(first: Verdict, second: Verdict, explain: Callable[[Scene], Verdict]) -> Verdict:
    """One is not enough: tell all places, and try changes at all of them at once."""
    first.alone = False
    found = [first, second]
    remains = _find_all(found, explain)
    more = f"without {'both' if len(found) == 2 else 'them all'} the step is finite" if remains.finite else "and they are not the only ones"
    first.finding.evidence.append(f"{_others(first, found[1:])}; {more}")
    healing = [r for r in second.remedies if r.result == "proven"]
    if not healing and remains.finite:
        healed = together(list(map(_part, found)))
        healing = [healed] if healed is not None else []
    first.remedies = healing + first.remedies
    for count, verdict in enumerate(found[1:]):
        _point_at(first, verdict, _ORDER[count])
    return first


def _others(first: Verdict, more: list[Verdict]) -> str:
    """Name the lines of other places, each once; those on the line of the first are not told by a number that was just said."""
    here = _place(first)
    named = list(dict.fromkeys(_named(verdict) for verdict in more if _place(verdict) != here))
    lines = len({_place(verdict) for verdict in more if _place(verdict) != here})
    if not named:
        return "this line makes non-finite values by more than one operation"
    what = "a second place makes non-finite values of its own" if lines == 1 else f"{lines} more places make non-finite values of their own"
    return f"{what}: {', '.join(named)}"


def _find_all(found: list[Verdict], explain: Callable[[Scene], Verdict]) -> Remains:
    """Add the places to two of them that the step depends on as well, as far as they are few; return what remains without them.

    A line may run more than once, in a loop or by calling itself: a change there changes all of these.
    """
    scene, mended = found[0].scene, _births(found)
    remains = _without(scene, *mended)
    while not remains.finite and len(mended) < RUNS:
        other = remaining_birth(scene.program, scene.targets, _places(mended), remains)
        known = other is not None and _line(other) in map(_line, mended)
        if other is None or not _line(other).known or (not known and len(found) == MOST):
            break
        if not known:
            found.append(explain(replace(scene, birth=other)))
        mended.append(other)
        remains = _without(scene, *mended)
    return remains


def _look_further(first: Verdict, explain: Callable[[Scene], Verdict]) -> None:
    """Finite values would do, but those that a change gives are bad further on (the log of a 0 it lets through): find where, and try both changes."""
    scene = first.scene
    assert scene.lab is not None
    for put in changes_at(_part(first)):
        with scene.lab.beside(put):
            changed = scene.program.changed(functools.partial(Swapper, scene.program, [put]))
            other = locate(changed, scene.targets)
            if other is None or not _line(other).known or _line(other) == _line(_birth(first)):
                continue
            second = explain(replace(scene, birth=other, program=changed))
        healed = together([_part(first), _part(second)]) if second.healed else None
        if healed is not None and healed.result == "proven":
            first.finding.evidence.append(f"with a change there alone, non-finite values are born at {_named(second)}")
            first.remedies.insert(0, healed)
            _point_at(first, second, "second")
            return


def _part(verdict: Verdict) -> Part:
    tried = tuple(dict.fromkeys(remedy.title for remedy in verdict.remedies if remedy.result != "not tried"))
    return Part(verdict.scene, verdict.finding, verdict.expression, verdict.site, tried)


def _point_at(first: Verdict, other: Verdict, order: str) -> None:
    line = _line(_birth(other))
    if (line.file, line.line) not in {(s.file, s.line) for s in first.finding.spans}:
        first.finding.spans.append(replace(line, label=f"a {order} place: {other.finding.label or _title(other)} ({other.rule.code})"))


def _birth(verdict: Verdict) -> Birth:
    assert verdict.scene.birth is not None
    return verdict.scene.birth


def _births(verdicts: list[Verdict]) -> list[Birth]:
    return list(map(_birth, verdicts))


def _places(births: list[Birth]) -> frozenset[Place]:
    return frozenset().union(*map(places_of, births))


def _line(birth: Birth) -> Span:
    return resolve(birth.site)


def _place(verdict: Verdict) -> tuple[str, int]:
    span = _line(_birth(verdict))
    return span.file, span.line


def _named(verdict: Verdict) -> str:
    span = _line(_birth(verdict))
    return f"{span.file}:{span.line} ({verdict.rule.code}, {_title(verdict)})"


def _title(verdict: Verdict) -> str:
    return verdict.finding.title or verdict.rule.title
