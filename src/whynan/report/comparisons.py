"""What changed between checkpoints, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whynan.forensics.checkpoints.roles import Role, role_of
from whynan.forensics.findings import Change, Comparison
from whynan.records import number
from whynan.report.lines import name_of, short, wrap

_CHANGES = 8


def compared(comparisons: Sequence[Comparison]) -> Iterator[list[str]]:
    """Yield one pair tensor by tensor, several pairs in a line each."""
    if len(comparisons) == 1:
        yield list(_comparison(comparisons[0]))
    elif comparisons:
        from whynan.forensics.checkpoints.comparing import where_growth_began

        lines = ["update ratios: norm of the change over the norm before it"]
        lines += [short(_pair(c)) for c in comparisons]
        yield lines + [line for told in where_growth_began(comparisons) for line in wrap(told)]


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield from wrap(f"{comparison.path} against {comparison.against}")
    if comparison.unreadable:
        yield f"  unreadable  {comparison.unreadable}"
        return
    own = [c for c in comparison.changes if role_of(c.name) in (Role.WEIGHT, Role.BUFFER)] or list(comparison.changes)
    moved, still = [c for c in own if not c.unchanged], [c for c in own if c.unchanged]
    shown = sorted(moved, key=lambda c: (_rank(c), -(c.ratio or 0.0)))
    yield from (_change(c) for c in shown[:_CHANGES])
    if len(moved) > _CHANGES:
        yield f"  and {len(moved) - _CHANGES} more"
    for label, names in (("unchanged", [c.name for c in still]), ("appeared", comparison.appeared), ("vanished", comparison.vanished)):
        if names:
            yield from wrap(f"  {label} {len(names)}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}", "    ")


def _rank(change: Change) -> int:
    """What cannot be compared first, then weights, then what starts from zero or follows by itself."""
    if change.ratio is None and change.largest is None:
        return 0
    return 3 if role_of(change.name) is Role.BUFFER else 2 if change.name.endswith("bias") else 1


def _change(change: Change) -> str:
    if change.ratio is None and change.largest is None:
        return f"  {change.name}  {change.note}"
    ratio = number(change.ratio) if change.ratio is not None else "from zero"
    return f"  {ratio:>10}  {change.name}  largest change {number(change.largest or 0.0)}" + (f"  ({change.note})" if change.note else "")


def _pair(comparison: Comparison) -> str:
    pair = f"  {name_of(comparison.against)} to {name_of(comparison.path)}"
    weights = [c for c in comparison.changes if c.ratio is not None and role_of(c.name) is Role.WEIGHT]
    top = min(weights, key=lambda c: c.name.endswith("bias"), default=None)  # a bias starts from zero: its ratio says little
    if comparison.unreadable or top is None:
        return f"{pair}  {comparison.unreadable or _not_compared(comparison)}"
    return f"{pair}  largest {number(top.ratio or 0.0)}  {top.name}" + (f"  ({top.note})" if top.note else "")


def _not_compared(comparison: Comparison) -> str:
    noted = next((f"{c.name}  {c.note}" for c in comparison.changes if c.note), "")
    return noted or ("all from zero" if comparison.changes else "nothing in common")
