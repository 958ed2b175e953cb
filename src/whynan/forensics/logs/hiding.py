"""Losses that look healthy and are not: a nan that the logger replaced, a loss that stands still, a value that no curve has."""

from __future__ import annotations

from whynan.forensics.findings import Finding, Severity
from whynan.forensics.logs.collecting import Log
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.series import Plateau, Series
from whynan.records import count, jsonable, number

_LONG = 20  # equal values in a row that no training gives
_SHORT = 3  # the same where the value is 0 and nothing came near it before
_MOVED = 8  # times the resolution of the printed numbers: a curve that moved so much does not come to rest by itself
_EXACT = 1e-7  # the resolution of float32, as a part of the value


def hiding(log: Log) -> list[Finding]:
    """Return what hides behind finite losses."""
    main = log.main_loss()
    found = _behind_norm(log, main) or ((_stopped(log, main) or _standing(log, main)) if main else None)
    return [found] if found else []


def absurd(log: Log) -> list[Finding]:
    """Return the finite values that are far beyond anything their series had before."""
    findings = []
    for series in log.curves:
        if series.absurd:
            moment, spike = series.absurd[0]
            more = f"; {count(series.absurd_count - 1)} more such values" if series.absurd_count > 1 else ""
            ratio = f", {abs(spike.value / spike.level):.2g} times" if spike.level else ";"
            message = f"{number(spike.value)} at {moment}{ratio} the running median {number(spike.level)}: finite, and absurd{more}"
            rows = tuple(m.position for m, _ in series.absurd)
            values = {"value": jsonable(spike.value), "median": jsonable(spike.level)}
            findings.append(Finding(Severity.SUSPECT, "absurd", message, series.name, "", rows, series.absurd_count, moment.line, values))
    return findings


def _behind_norm(log: Log, main: Series | None) -> Finding | None:
    """Trainer's `logging_nan_inf_filter` writes the mean of the finite losses since the last line, 0.0 where there was none."""
    met = log.hidden
    norms = [s for s in log.of_role(Role.NORM) if s.open_run]
    if met.first is None or main is None or not (norms or met.zeros > 1) or not (met.zeros or _repeats(main)):
        return None
    shown = "0.0" if met.zeros else number(main.last_value)
    message = (
        f"reads {shown} while the gradient norm is not finite, at {count(met.count)} steps since {met.first}: "
        "the real loss is nan, and the logger hides it (in Trainer, logging_nan_inf_filter=False shows it)"
    )
    return Finding(Severity.BAD, "hidden-nan", message, main.name, "", (met.first.position,), met.count, met.first.line, {"zeros": met.zeros})


def _stopped(log: Log, main: Series) -> Finding | None:
    """Loggers that know no nan leave the place empty: orjson, pandas."""
    silence = log.silences.get(main.name)
    if silence is None or silence.first is None or silence.length < _SHORT or silence.length <= 3 * silence.longest:
        return None
    message = f"stops being written: named without a value from {silence.first} to the end, {count(silence.length)} times, as orjson and pandas write a nan"
    return Finding(Severity.SUSPECT, "stops", message, main.name, "", (silence.first.position,), silence.length, silence.first.line)


def _repeats(series: Series) -> bool:
    return series.plateau is not None and series.plateau.length >= _SHORT


def _standing(log: Log, main: Series) -> Finding | None:
    held = main.plateau
    if held is None or main.open_run or held.length < _SHORT or not _abrupt(main, held) or _has_gradient(log, held):
        return None
    never_near = held.value == 0.0 and main.longest < _SHORT and main.smallest > 50 * _resolution(main)
    if held.length < _LONG and not never_near:
        return None
    zero = held.value == 0.0
    why = "a nan that the logger replaces by 0 looks like this, and so does a loss without a gradient" if zero else "nothing is trained any more"
    since = f"is exactly {number(held.value)} from {held.first} to the end, {count(held.length)} values"
    message = f"{since}; before it, values differed by about {number(main.usual_change)}: {why}"
    return Finding(
        Severity.SUSPECT, "silent-death", message, main.name, "", (held.first.position,), held.length, held.first.line, {"value": jsonable(held.value)}
    )


def _abrupt(series: Series, held: Plateau) -> bool:
    """Whether the curve stopped at once: one that comes to rest slows down first."""
    return series.usual_change >= _MOVED * _resolution(series) and held.length > 3 * series.longest


def _resolution(series: Series) -> float:
    return max(10.0**-series.decimals, _EXACT * series.largest)


def _has_gradient(log: Log, held: Plateau) -> bool:
    """Whether a loss of 0 still comes with a gradient: policy losses are 0 by construction."""
    norms = log.of_role(Role.NORM)
    return held.value == 0.0 and bool(norms) and all(s.last_value > 0.0 for s in norms)
