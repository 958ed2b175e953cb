"""The report of `whynan check` as annotations on GitHub."""

from __future__ import annotations

from collections.abc import Iterator

from whynan.forensics.findings import Checked, Finding, Report, Severity
from whynan.report.lines import printable

_LEVELS = {Severity.BAD: "error", Severity.SUSPECT: "warning"}


def github(report: Report) -> str:
    """Return one annotation a line, as GitHub Actions reads them; it shows ten a step, so findings alike are counted in one.

    >>> from whynan.forensics.findings import Checked
    >>> print(github(Report((Checked("a,b.pt", findings=(Finding(Severity.BAD, "not-finite", "100% nan", "w", "WN601"),)),))))
    ::error file=a%2Cb.pt,title=WN601 not-finite::w: 100%25 nan
    """
    everything = (*report.checked, *(m for h in report.histories for m in h.members))
    pairs = (_annotation("error", c.path, "cannot be compared", c.unreadable, 0) for c in report.comparisons if c.unreadable)
    return "\n".join([*(line for checked in everything for line in _annotations(checked)), *pairs])


def _annotations(checked: Checked) -> Iterator[str]:
    if checked.unreadable:
        yield _annotation("error", checked.path, "cannot be read", checked.unreadable, 0)
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in checked.findings:
        if finding.severity in _LEVELS:
            alike.setdefault((_LEVELS[finding.severity], finding.code, finding.what), []).append(finding)
    for (level, code, what), findings in alike.items():
        first, more = findings[0], f"; and {len(findings) - 1} more like it" if len(findings) > 1 else ""
        message = f"{first.place}: {first.message}" if first.place else first.message
        yield _annotation(level, checked.path, f"{code} {what}".strip(), message + more, first.line)


def _annotation(level: str, path: str, title: str, message: str, line: int) -> str:
    where = f"file={_escape_property(path)}" + (f",line={line}" if line else "")
    return f"::{level} {where},title={_escape_property(title)}::{_escape(message)}"


def _escape(value: str) -> str:
    return printable(value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _escape_property(value: str) -> str:
    return _escape(value).replace(":", "%3A").replace(",", "%2C")
