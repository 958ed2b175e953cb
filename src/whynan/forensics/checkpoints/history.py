"""A folder of checkpoints as a history: in which order they were written, which is the last healthy one, what went bad first."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from whynan.forensics.checkpoints.examining import examine, joined
from whynan.forensics.checkpoints.growth import growth_before
from whynan.forensics.checkpoints.members import Folder, Member
from whynan.forensics.checkpoints.steps import series_of, step_in_name
from whynan.forensics.findings import Checked, Finding, History, Severity
from whynan.forensics.wishes import Wishes

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Placed:
    """A member with everything that may tell when it was written."""

    checked: Checked
    inside: int | None
    epoch: int | None
    number: int | None
    modified: float

    @property
    def blind(self) -> bool:
        """Whether it could not be asked."""
        return bool(self.checked.unreadable) and self.inside is None


def tell_history(folder: Folder, wishes: Wishes) -> History:
    """Check every checkpoint of a folder and put them in order.

    Cost: every file is read once, one after the other.
    """
    placed = [_place(member, wishes) for member in folder.members]
    notes = list(folder.notes)
    ordered = [p.checked for p in in_order(placed)]
    kept = _without_copies(ordered, notes)
    notes += _tell_series(kept)
    bad = next((i for i, c in enumerate(kept) if c.bad), None)
    return History(
        str(folder.place),
        tuple(kept),
        _last_healthy(kept, {str(m.place) for m in folder.members if m.beside}),
        kept[bad].path if bad is not None else "",
        story=tuple(_story(kept)),
        growth=tuple(growth_before(kept, next((i for i, c in enumerate(kept) if _value_findings(c)), None))),
        notes=tuple(notes),
    )


def _last_healthy(members: Sequence[Checked], beside: Container[str]) -> str:
    """The last one to start from; an optimizer whose weights are not there is none, unless there is nothing else."""
    healthy = sorted((c for c in members if c.healthy), key=lambda c: c.path not in beside)
    return healthy[-1].path if healthy else ""


def _place(member: Member, wishes: Wishes) -> _Placed:
    seen = [examine(part, wishes) for part in member.parts]
    name = member.place.name
    inside = next((s.inside for s in seen if s.inside is not None), None)
    epoch = next((s.epoch for s in seen if s.epoch is not None), None)
    return _Placed(joined(str(member.place), [s.checked for s in seen], inside), inside, epoch, step_in_name(name), member.modified)


def in_order(placed: Sequence[_Placed]) -> list[_Placed]:
    """Sort by the first of step, epoch and number in the name that all readable ones have, else by time; the others find their place among them."""
    readable = [p for p in placed if not p.blind]
    sources: list[Callable[[_Placed], int | None]] = [lambda p: p.inside, lambda p: p.epoch, lambda p: p.number]
    chosen = next((s for s in sources if readable and all(s(p) is not None for p in readable)), None)
    chosen = chosen or next((s for s in sources if any(s(p) is not None for p in readable)), None)
    epochs = _steps_restart(readable)
    known = [p for p in readable if chosen is not None and chosen(p) is not None]
    known.sort(key=lambda p: ((p.epoch or 0) * epochs, chosen(p) or 0 if chosen else 0, p.number is None, p.number or 0, p.modified, p.checked.path))
    there = set(map(id, known))
    for late in sorted((p for p in placed if id(p) not in there), key=lambda p: (p.number or 0, p.modified, p.checked.path)):
        known.insert(_position(late, known), late)
    return known


def _steps_restart(placed: Sequence[_Placed]) -> bool:
    """Whether the step counts within an epoch: some later epoch has a lower one."""
    said = sorted((p.epoch, p.inside) for p in placed if p.epoch is not None and p.inside is not None)
    return len(said) == len(placed) and any(b[0] > a[0] and b[1] < a[1] for a, b in pairwise(said))


def _position(late: _Placed, known: Sequence[_Placed]) -> int:
    """Where one that says no step belongs: by the number in its name, else by its time."""
    if late.number is not None and any(k.number is not None for k in known):
        before = [i for i, k in enumerate(known) if k.number is not None and k.number <= late.number]
    else:
        before = [i for i, k in enumerate(known) if k.modified <= late.modified]
    return before[-1] + 1 if before else 0


def _without_copies(ordered: list[Checked], notes: list[str]) -> list[Checked]:
    """Say what has no number in its name and holds the same as another one, as `last.ckpt` does, and leave it out.

    A bad one stays in: it must be moved aside like the other, or the next start would load it.
    """
    nameless = [c for c in ordered if step_in_name(c.name) is None and c.tensors and not c.unreadable]
    kept = list(ordered)
    for copy in nameless:
        twins = [c for c in kept if c is not copy and copy.step in (None, c.step) and c.tensors == copy.tensors and c.facts == copy.facts]
        if twins:
            twin = min(twins, key=lambda c: step_in_name(c.name) is None)
            if copy.healthy:
                kept.remove(copy)
            notes.append(f"{copy.name} holds the same as {twin.name}")
    return kept


def _tell_series(members: Sequence[Checked]) -> Iterator[str]:
    """Name the last healthy one of each series where several lie in one folder: two runs, or two networks."""
    series: dict[str, list[Checked]] = {}
    for member in members:
        series.setdefault(series_of(member.name), []).append(member)
    several = {name: found for name, found in series.items() if len(found) > 1}
    if len(several) > 1 and not all(m.healthy for m in members):
        for name, found in several.items():
            last = next((m.name for m in reversed(found) if m.healthy), "none")
            yield f"several series in one folder; last healthy of {name}: {last}"


def _story(members: Sequence[Checked]) -> list[str]:
    """Say what went bad first, where values first did, and from where on nothing is healthy any more."""
    bad = [i for i, c in enumerate(members) if c.bad]
    if not bad:
        return []
    values = next((i for i in bad if _value_findings(members[i])), None)
    last = max((i for i, c in enumerate(members) if c.healthy), default=-1)
    told = dict.fromkeys(i for i in (bad[0], values, last + 1) if i in bad)
    return [line for i in told if i is not None for line in _went_bad(members, i)]


def _value_findings(checked: Checked) -> list[Finding]:
    return [f for f in checked.findings if f.severity is Severity.BAD and f.what != "dangerous-pickle"]


def _went_bad(members: Sequence[Checked], index: int) -> list[str]:
    checked = members[index]
    earlier = [c for c in reversed(members[:index]) if c.healthy]
    own = (c for c in earlier if series_of(c.name) == series_of(checked.name))
    before = next(own, next(iter(earlier), None))
    since = f"healthy until {before.name}" if before is not None else "no healthy one before it"
    if checked.unreadable:
        return [f"{checked.name}: {checked.unreadable} ({since})"]
    worst = [f for f in checked.findings if f.severity is Severity.BAD]
    already = {(f.place, f.what) for c in members[:index] for f in c.findings if f.severity is Severity.BAD}
    fresh = [f for f in worst if (f.place, f.what) not in already] or worst
    said = "; ".join(f"{f.place}: {f.message}" if f.place else f.message for f in fresh[:_SHOWN])
    more = f"; and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else ""
    lines = [f"{checked.name}: {said}{more} ({since})"]
    if all(f.code in ("WN603", "WN606") for f in worst):
        lines.append(f"{checked.name}: the weights in it are finite; what is bad is kept beside them")
    return lines
