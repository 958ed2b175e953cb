"""Learning rates against what was wished for and against themselves; loss scales; what a log counts of its own accord."""

from __future__ import annotations

from collections.abc import Mapping

from whynan.forensics.findings import Finding, Severity
from whynan.forensics.logs.collecting import Log
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.series import Series
from whynan.records import count, jsonable, number

_NEAR = 0.05  # rates are printed with few digits
_FEW = 10
_FALL = 2.0**10  # a scale that settles falls by less


def rates(log: Log, expect: Mapping[str, float]) -> list[Finding]:
    """Return what is wrong with learning rates."""
    series = [s for s in log.of_role(Role.RATE) if not s.naming.summary and s.total > s.bad]
    findings = [f for s in series for f in (*_resumed(s), *_jumped(s))]
    zero = [s for s in series if s.largest == 0.0 and s.total >= _FEW and log.form != "text log"]
    findings += [Finding(Severity.SUSPECT, "rate-zero", f"is 0 in all {count(s.total)} values", s.name) for s in zero]
    wish = next((expect[n] for n in ("lr", "learning_rate", "learning rate") if n in expect), None)
    return findings + (_against(series, wish) if wish is not None and series else [])


def _against(series: list[Series], wish: float) -> list[Finding]:
    """Compare the highest rate with the wish: a schedule passes below it, never above."""
    if any(abs(s.largest - wish) <= _NEAR * wish for s in series):
        return []
    top = max(series, key=lambda s: s.largest)
    if top.largest < wish and _still_to_come(top):
        return []
    at = f" at {top.peak}" if top.peak else ""
    message = f"reaches {number(top.largest)}{at}, {number(wish)} was expected: a loaded optimizer or scheduler may have replaced it"
    values = {"highest": jsonable(top.largest), "expected": jsonable(wish)}
    return [
        Finding(
            Severity.SUSPECT,
            "rate-overridden",
            message,
            top.name,
            "WN607",
            (top.peak.position,) if top.peak else (),
            line=top.peak.line if top.peak else 0,
            values=values,
        )
    ]


def _still_to_come(series: Series) -> bool:
    """Whether the highest rate may lie outside of the log: it still rises at the end, or falls from the first line of a log that begins late."""
    stretches = [s for s in series.curve.stretches if s.finite]
    rising = stretches[-1].high >= series.largest > stretches[0].high
    late = series.first is not None and (series.first.step or 0) > series.total // 10 and stretches[0].high == series.largest
    return rising or (late and stretches[-1].low < stretches[0].high)


def _resumed(series: Series) -> list[Finding]:
    findings = []
    for again in series.resumed:
        if again.high > 0.0 and again.value > again.high * (1 + _NEAR):
            at = again.resume.after
            message = f"{number(again.value)} at {at} after the run was resumed, {number(again.high)} there before it"
            values = {"before": jsonable(again.high), "after": jsonable(again.value)}
            findings.append(Finding(Severity.SUSPECT, "rate-overridden", message, series.name, "WN607", (at.position,), 1, at.line, values))
    return findings


def _jumped(series: Series) -> list[Finding]:
    back = {r.resume.after.position for r in series.resumed}
    jumps = [j for j in series.jumps if j[0].position not in back]
    return [
        Finding(
            Severity.NOTE,
            "rate-jump",
            f"rises from {number(old)} to {number(new)} at {at}, after it had held or fallen",
            series.name,
            "",
            (at.position,),
            1,
            at.line,
        )
        for at, old, new in jumps
    ]


def scales(log: Log) -> list[Finding]:
    """Return the loss scales that fell to nothing and did not come back."""
    findings = []
    for series in log.of_role(Role.SCALE):
        stretches = [s for s in series.curve.stretches if s.finite]
        last = series.last_value
        if stretches and last <= 1.0 and series.largest >= _FALL * last and last == min(s.low for s in stretches):
            begin = next(s for s in stretches if s.low <= 1.0)
            message = f"fell from {number(series.largest)} to {number(last)} and stays there: every step overflows at any scale"
            values = {"highest": jsonable(series.largest), "last": jsonable(last)}
            findings.append(Finding(Severity.SUSPECT, "loss-scale-collapse", message, series.name, "WN606", (begin.first,), values=values))
    return findings


def tallies(log: Log) -> list[Finding]:
    """Return the counts of nan that a log keeps itself, where they are not 0."""
    return [
        Finding(Severity.SUSPECT, "counted-nan", f"the log itself counts {number(s.largest)}", s.name)
        for s in log.of_role(Role.TALLY)
        if s.largest > 0.0 and s.total > s.bad
    ]
