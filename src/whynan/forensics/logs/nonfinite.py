"""Series with values that are not finite: which of them are damage, and which are how loggers say "nothing yet"."""

from __future__ import annotations

import math

from whynan.forensics.findings import Finding, Severity
from whynan.forensics.logs.clock import Moment
from whynan.forensics.logs.collecting import Log
from whynan.forensics.logs.forms import Form
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.series import Run, Series
from whynan.records import Json, count, jsonable, number

_SETTLING = 24  # non-finite norms at the beginning while a gradient scaler finds its scale: 2^24 down to 1
_LASTING = 3  # non-finite values in a row at the end that are not one skipped step any more
_MOST_ROWS = 10
_MOST_SERIES = 12


def nonfinite(log: Log) -> list[Finding]:
    """Return a finding for every series that is not finite somewhere; the first one in time comes first and tells what came before it."""
    judged = [(s, severity_of(s, log)) for s in log.curves if s.bad]
    real = sorted((p for p in judged if p[1] is not Severity.NOTE), key=lambda p: _when(p[0]))
    noted = [(s, v) for s, v in judged if v is Severity.NOTE and s.total > 1]  # a single one is an option that was printed: `max_size: inf`
    findings = [_finding(s, v, _story(s, log) if n == 0 else "") for n, (s, v) in enumerate(real[:_MOST_SERIES])]
    if len(real) > _MOST_SERIES:
        findings.append(Finding(real[-1][1], "not-finite", f"and {len(real) - _MOST_SERIES} more series that are not finite"))
    return findings + [_finding(s, v, _excuse(s)) for s, v in noted[:_MOST_SERIES]]


def first_bad(log: Log) -> Series | None:
    """Return the series that went bad first, of those where it means damage."""
    real = [s for s in log.curves if s.bad and severity_of(s, log) is not Severity.NOTE]
    return min(real, key=_when, default=None)


def _when(series: Series) -> tuple[int, int, bool]:
    first = series.runs[0].first
    roles = {Role.LOSS: 0, Role.NORM: 1}
    return first.line or first.position, roles.get(series.naming.role, 2), series.naming.main  # a term of the loss before the loss


def severity_of(series: Series, log: Log) -> Severity:
    """Say what non-finite values mean in a series, by its name and by where they lie."""
    naming = series.naming
    if _is_missing(series, log.form == Form.TABLE):
        return Severity.NOTE
    main = log.main_loss()
    if naming.power and not series.nan and main is not None and not main.naming.power and not main.bad:
        return Severity.NOTE
    if naming.role is Role.NORM and not naming.validation:
        return _norm(series, log)
    if naming.role is Role.LOSS:
        if naming.trained_on:
            return Severity.BAD
        return Severity.NOTE if _not_yet(series, log) else Severity.BAD
    if naming.role in (Role.RATE, Role.SCALE):
        return Severity.SUSPECT
    run = series.open_run
    turned = run is not None and run.length >= _LASTING and series.total - series.bad >= _LASTING and not naming.summary
    return Severity.SUSPECT if turned else Severity.NOTE


def _is_missing(series: Series, table: bool) -> bool:
    """Whether nan stands for "no value in this row": finite values keep coming between."""
    if series.inf or series.run_count < 3 or 2 * series.nan <= series.total or (series.naming.trained_on and not table):
        return False
    run = series.open_run
    return run is None or run.length <= 2 * max(r.length for r in series.runs[:-1])


def _not_yet(series: Series, log: Log) -> bool:
    """Whether a validation or a summary had nothing to be computed from yet."""
    if series.finite_before is not None:
        return False
    if series.bad < series.total:
        return series.run_count == 1
    main = log.main_loss()
    return series.naming.summary or main is None or 2 * series.total > main.total  # written with every line: a placeholder


def _norm(series: Series, log: Log) -> Severity:
    """A gradient scaler skips a step now and then, and the norm of a skipped step is not finite."""
    run = series.open_run
    if run is not None and (run.length >= _LASTING or series.bad == series.total):
        return Severity.BAD
    main = log.main_loss()
    if main is not None and main.bad:
        return Severity.BAD
    later = series.runs[1:] if series.finite_before is None and series.runs[0].length <= _SETTLING else series.runs
    few = series.bad <= _SETTLING or 20 * series.bad <= series.total
    return Severity.NOTE if few and all(r.length < _LASTING for r in later) else Severity.SUSPECT


def _finding(series: Series, severity: Severity, more: str) -> Finding:
    run = series.runs[0]
    message = f"{_course(series, run)}{more}"
    rows = tuple(r.first.position for r in series.runs[:_MOST_ROWS])
    return Finding(severity, "not-finite", message, series.name, "", rows, series.bad, run.first.line, _values(series, run))


def _course(series: Series, run: Run) -> str:
    """Say what the non-finite values are and where they lie."""
    share = f"{count(series.bad)} of {count(series.total)} values"
    kind = number(run.value)
    if run.then is not None and not run.ended:
        return f"{kind} at {run.first}, {'nan' if kind != 'nan' else 'inf'} from {run.then} on; not finite in {share}"
    word = kind if not (series.nan and series.inf) else "not finite"
    if series.bad == 1:
        return f"{kind} at {run.first}, 1 of {count(series.total)} values"
    if series.run_count == 1:
        until = "to the end" if not run.ended else f"to {run.last}"
        return f"{word} from {run.first} {until}, {share}"
    return f"{word} in {share}, first at {run.first}, last at {series.runs[-1].last}"


def _story(series: Series, log: Log) -> str:
    """What came before the first non-finite value of all, and what was still finite then."""
    first = series.runs[0].first
    words = []
    if series.finite_before is not None:
        moment, value = series.finite_before
        words.append(f"; {number(value)} at {moment} before it")
    for moment, spike in list(series.spikes)[-1:]:
        ratio = abs(spike.value / spike.level) if spike.level else math.inf
        if first.position - moment.position <= max(50, (first.position - (series.first or first).position) // 20):
            words.append(f"; a spike to {number(spike.value)} at {moment}, {number(float(f'{ratio:.2g}'))} times the running median")
    also = [s.name for s in log.curves if s is not series and s.runs and s.naming.trained_on and s.runs[0].first.position == first.position]
    fine = [s.name for s in log.curves if s.naming.trained_on and _is_fine_at(s, first)]
    words.append(f"; the same at that step: {_listed(also)}" if also else "")
    words.append(f"; still finite then: {_listed(fine)}" if fine and not log.hidden.zeros else "")
    return "".join(words)


def _is_fine_at(series: Series, moment: Moment) -> bool:
    there = series.first is not None and series.last is not None and series.first.position <= moment.position <= series.last.position
    return there and (not series.runs or series.runs[0].first.position > moment.position)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _excuse(series: Series) -> str:
    if series.naming.role is Role.NORM:
        return "; finite again after it: a step that a gradient scaler skips looks like this"
    if series.naming.power and not series.nan:
        return "; the loss it is a power of is finite"
    if series.bad == series.total:
        return "; it was never computed"
    if series.finite_before is None and series.run_count == 1:
        return "; before it was first computed"
    return "; rows without a value" if series.run_count >= 3 and 2 * series.nan > series.total else ""


def _values(series: Series, run: Run) -> dict[str, Json]:
    values: dict[str, object] = {"first": run.value, "nan": series.nan, "inf": series.inf, "values": series.total, "runs": series.run_count}
    if run.then is not None:
        values["then"] = run.then.position
    if series.finite_before is not None:
        values["before"] = series.finite_before[1]
    if series.spikes:
        values["spikes"] = [{"step": m.position, "value": s.value, "median": s.level} for m, s in series.spikes]
    return {k: jsonable(v) for k, v in values.items()}
