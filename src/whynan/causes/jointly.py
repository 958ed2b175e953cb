"""Try changes at several places of a step at once, where none of them alone makes it finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from whynan.capsule.sites import Site, resolve
from whynan.causes.catalogue import Finding, Scene
from whynan.causes.diffs import joined
from whynan.causes.fixes import Fix
from whynan.causes.source import Expression
from whynan.causes.swapping import Put
from whynan.causes.trying import TRIES, Trial, judged, read_again, trial_of
from whynan.records import Remedy

PAIRED = 2  # changes at one of several places that are tried together with those at the others


@dataclass(frozen=True, slots=True)
class Part:
    """One of several places that a step cannot do without changing."""

    scene: Scene
    finding: Finding
    expression: Expression | None
    site: Site | None
    tried: tuple[str, ...] = ()  # changes there that were played alone


def together(parts: list[Part]) -> Remedy | None:
    """Try changes at several places at once; return the first that is proven, as one remedy, else the first that at least makes the step finite.

    Cost: at most eight trials for two places, twelve for more.
    """
    joint = _Joint()
    alike = [title for title in parts[0].tried if all(title in part.tried for part in parts)]
    for title in [*alike[:PAIRED], ""]:  # what is wrong in the same way at several places mostly takes one change
        if (found := joint.proven(parts, [], title)) is not None:
            return found
    return joint.finite


def changes_at(part: Part) -> list[Put]:
    """Return the first changes that fit a place."""
    return [trial.put for _, trial in islice(_fitting(part), PAIRED) if trial.put is not None]


def _fitting(part: Part) -> Iterator[tuple[Fix, Trial]]:
    expression = read_again(part.scene, part.expression)
    for fix in part.finding.fixes:
        if fix.limit:
            continue  # whether there is one is asked of a change alone
        trial = trial_of(part.scene, fix, expression, part.site)
        if trial is not None and trial.put is not None:
            yield fix, trial


class _Joint:
    """Changes at several places, tried at once."""

    def __init__(self) -> None:
        self.left = 3 * TRIES
        self.finite: Remedy | None = None  # the first that makes the step finite, though not as it should be
        self._tried: set[tuple[int, ...]] = set()

    def proven(self, parts: list[Part], chosen: list[tuple[Fix, Trial, Site | None]], title: str = "") -> Remedy | None:
        """Return the first that is proven; with a title, of those that are the same at all places."""
        part, rest = parts[0], parts[1:]
        lab = part.scene.lab
        assert lab is not None
        fitting = ((fix, trial) for fix, trial in _fitting(part) if title in ("", fix.title))
        for fix, trial in islice(fitting, PAIRED if rest else TRIES):
            now = [*chosen, (fix, trial, fix.site or part.site)]
            if not rest:
                found = self._judged(part, now)
            else:
                assert trial.put is not None
                with lab.beside(trial.put):
                    found = self.proven(rest, now, title)
            if found is not None:
                return found
        return None

    def _judged(self, part: Part, chosen: list[tuple[Fix, Trial, Site | None]]) -> Remedy | None:
        """Play the step with all changes, the last of them and those beside it; return what it is if it is proven."""
        what = tuple(id(fix) for fix, _, _ in chosen)
        if what in self._tried or self.left <= 0:
            return None
        self._tried.add(what)
        self.left -= 1
        remedy = judged(part.scene, part.finding, *chosen[-1][:2])
        if remedy.result == "failed" and remedy.effect.startswith("finite, but") and self.finite is None:
            self.finite = _as_one(remedy, chosen)
        return _as_one(remedy, chosen) if remedy.result == "proven" else None


def _as_one(last: Remedy, chosen: list[tuple[Fix, Trial, Site | None]]) -> Remedy:
    """Make one remedy of the changes that were tried together; `last` is what is known of it."""
    (first, _, _), *others = chosen
    lines: dict[str, list[int]] = {}
    for fix, _, site in others:
        lines.setdefault(fix.title, []).append(resolve(site).line)
    more = [f"and at line {' and '.join(map(str, dict.fromkeys(at)))}: {'the same' if title == first.title else title}" for title, at in lines.items()]
    title = "; ".join([first.title, *more])
    written = [trial.written for _, trial, _ in chosen]
    diff = joined([w for w in written if w is not None]) if all(written) else ""
    alive = not any(each.dead for _, trial, _ in chosen for each in trial.stopped)
    effect = last.effect if diff or last.result == "failed" or last.effect.startswith("with that: ") else f"with that: {last.effect}"
    return replace(last, title=title, diff=diff, safe=all(fix.safe for fix, _, _ in chosen), effect=effect, alive=alive)
