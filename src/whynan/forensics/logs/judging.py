"""All that is found in a log, the worst first, and what is worth knowing of how it was written."""

from __future__ import annotations

from whynan.forensics.findings import Finding, Severity
from whynan.forensics.logs.collecting import Log
from whynan.forensics.logs.hiding import absurd, hiding
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.nonfinite import first_bad, nonfinite
from whynan.forensics.logs.ordering import Order
from whynan.forensics.logs.rates import rates, scales, tallies
from whynan.forensics.logs.series import Series
from whynan.forensics.wishes import Wishes
from whynan.records import Json, count, jsonable

_ORDER = {Severity.BAD: 0, Severity.SUSPECT: 1, Severity.NOTE: 2}


def judge(log: Log, wishes: Wishes) -> tuple[Finding, ...]:
    """Return everything found in a log."""
    findings = [*nonfinite(log), *hiding(log), *absurd(log), *rates(log, wishes.expect), *scales(log), *tallies(log), *_writing(log)]
    return tuple(sorted(findings, key=lambda f: _ORDER[f.severity]))


def facts_of(log: Log) -> dict[str, Json]:
    """Return the plain facts: how much there is, and where the first damage lies."""
    main = log.main_loss()
    bad = first_bad(log)
    facts: dict[str, Json] = {"entries": log.entries, "series": [s.name for s in log.curves[:64]]}
    if main is not None and main.first and main.last:
        facts |= {"loss": main.name, "first": str(main.first), "last": str(main.last), "last_value": jsonable(main.last_value)}
    if bad is not None:
        run = bad.runs[0]
        facts |= {"first_bad": bad.name, "first_bad_step": run.first.position, "first_bad_at": str(run.first), "first_bad_value": jsonable(run.value)}
    peaks = {s.name: jsonable(s.largest) for s in log.of_role(Role.RATE)[:8]}
    return facts | ({"highest_rate": peaks} if peaks else {})


def _writing(log: Log) -> list[Finding]:
    longest = max(log.curves, key=lambda s: (s.naming.role is Role.LOSS, s.total))
    notes = [*_ranks(longest), *_resumes(longest), *_gaps(longest)]
    if log.broken:
        notes.append(_note("broken", f"{count(log.broken)} broken line{'s' * (log.broken > 1)} passed over"))
    if log.crowded:
        notes.append(_note("crowded", f"more than 1 024 names; {count(log.crowded)} values of the others were not looked at"))
    return notes


def _note(what: str, message: str, place: str = "", rows: tuple[int, ...] = (), line: int = 0) -> Finding:
    return Finding(Severity.NOTE, what, message, place, rows=rows, row_count=len(rows), line=line)


def _ranks(series: Series) -> list[Finding]:
    order: Order = series.order
    times = order.typical
    steps = sum(order.copies.values())
    if times < 2 or 2 * order.copies[times] < steps:
        return []
    same = (
        "the same line"
        if not order.differing
        else f"its own line (values differ at {count(order.differing)} of {count(steps)} steps; a non-finite one is kept, else the first)"
    )
    return [_note("duplicates", f"every step is written {times} times: {times} ranks each write {same}", series.name)]


def _resumes(series: Series) -> list[Finding]:
    return [
        _note("resumed", f"goes back from {r.before} to {r.after}: the run was resumed or begun again there", series.name, (r.after.position,), r.after.line)
        for r in series.order.resumes[:5]
    ]


def _gaps(series: Series) -> list[Finding]:
    strides = series.order.strides
    if not strides or 10 * strides.most_common(1)[0][1] < 9 * sum(strides.values()):
        return []
    return [_note("gap", f"nothing between {before} and {after}", series.name, (after.position,), after.line) for before, after in series.order.gaps[:5]]
