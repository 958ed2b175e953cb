"""The report of `whynan check`, for a terminal and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from whynan.forensics.findings import Checked, Finding, History, Kind, Report, Severity
from whynan.records import count, number
from whynan.report.comparisons import compared
from whynan.report.lines import WIDTH, name_of, printable, short, wrap

_SHOWN = 6  # findings of one file; with --all every one
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def text(report: Report, everything: bool = False) -> str:
    """Return the report for a terminal, 80 columns wide, the worst first; the verdict ends it."""
    blocks = [
        *(_checked(c, everything) for c in sorted(report.checked, key=_badness, reverse=True)),
        *(_history(h, report.dry_run, everything) for h in report.histories),
        *compared(report.comparisons, report.growth),
        [line for note in report.notes for line in wrap(f"note: {note}")],
        list(_verdict(report)),
    ]
    return "\n\n".join("\n".join(map(printable, block)) for block in blocks if block)


def show(report: Report, everything: bool = False) -> None:
    """Print the report on stdout, in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    class Told(Console):
        def on_broken_pipe(self) -> None:
            """Let the caller decide: rich would end the program, with the exit status of findings."""
            raise BrokenPipeError

    console = Told(highlight=False, soft_wrap=True)
    for line in text(report, everything).splitlines():
        console.print(Text(line, style=_style(line)), soft_wrap=True)


def _style(line: str) -> str:
    words = line.split()
    if "  bad  " in f"{line}  " or "  unreadable  " in line or line.startswith("first bad:"):
        return "red"
    if "  suspect  " in line:
        return "yellow"
    return "bold" if words[:1] == ["whynan:"] else "dim" if words[:1] in (["note"], ["note:"]) else ""


def as_json(report: Report) -> str:
    """Return the report as one JSON object; non-finite numbers are strings."""
    return json.dumps(report.to_json(), allow_nan=False, ensure_ascii=True)


def size_text(size: int) -> str:
    """Print a size in bytes.

    >>> size_text(1234567), size_text(12)
    ('1.2 MB', '12 bytes')
    """
    return next((f"{size / unit:.1f} {name}" for name, unit in _UNITS if size >= unit), f"{size} bytes")


def _badness(checked: Checked) -> int:
    return 3 if checked.unreadable else {Severity.BAD: 2, Severity.SUSPECT: 1, None: 0, Severity.NOTE: 0}[checked.worst]


def _checked(checked: Checked, everything: bool) -> list[str]:
    about = [str(checked.kind or ""), checked.form, size_text(checked.size) if checked.size else ""]
    about += [f"step {checked.step}" if checked.step is not None else "", _tensors(checked)]
    lines = wrap(f"{checked.path}  {', '.join(a for a in about if a)}".rstrip())
    if checked.unreadable:
        lines += wrap(f"  unreadable  {checked.unreadable}", " " * 14)
    lines += _findings(checked.findings, everything)
    if not checked.findings and not checked.unreadable:
        lines.append("  nothing found")
    if everything:
        lines += _listed(checked)
    elif checked.kind is Kind.DATA:
        lines += _ranges(checked)
    if checked.plot:
        lines += checked.plot.splitlines()
    return lines


def _ranges(checked: Checked) -> list[str]:
    """Say from where to where the finite values of each column go."""
    known = [f"{t.name or 'values'} {number(t.min)} to {number(t.max)}" for t in checked.tensors if t.min is not None and t.max is not None]
    more = f", and {count(len(known) - _SHOWN)} more columns; --all lists them" if len(known) > _SHOWN else ""
    return wrap(f"  range   {', '.join(known[:_SHOWN])}{more}", " " * 10) if known else []


def _listed(checked: Checked) -> list[str]:
    return [line for t in checked.tensors for line in wrap(f"  {t.name}  {t.line()}", "    ")]


def _tensors(checked: Checked) -> str:
    word = "column" if checked.kind is Kind.DATA else "tensor"
    return f"{count(len(checked.tensors))} {word}{'s' * (len(checked.tensors) != 1)}" if checked.tensors else ""


def _findings(findings: Sequence[Finding], everything: bool) -> list[str]:
    """Several like each other are counted after the first few."""
    shown = findings if everything else findings[:_SHOWN]
    lines = [line for f in shown for line in wrap(f"  {f.severity:8}{_said(f)}", " " * 10)]
    rest = findings[len(shown) :]
    if rest:
        kinds = ", ".join(f"{sum(f.severity is s for f in rest)} {s}" for s in Severity if any(f.severity is s for f in rest))
        lines.append(f"  and {len(rest)} more ({kinds}); --all lists them")
    return lines


def _said(finding: Finding) -> str:
    where = f"{finding.place}: " if finding.place else ""
    line = f" (line {finding.line})" if finding.line else ""
    return f"{where}{finding.message}{line}" + (f" ({finding.code})" if finding.code else "")


def _history(history: History, dry_run: bool, everything: bool) -> list[str]:
    bad, unread = sum(m.bad for m in history.members), sum(not m.bad and not m.healthy for m in history.members)
    lines = wrap(f"{history.folder}  {len(history.members)} checkpoints, {bad} bad" + (f", {unread} not read" if unread else ""))
    wide = min(max((len(name_of(m.path)) for m in history.members), default=0), 36)
    digits = max((len(str(m.step)) for m in history.members if m.step is not None), default=1)
    rows = [(m, _row(m, wide, digits)) for m in history.members]
    lines += [short(row) for _, row in rows]
    seen: set[tuple[str, str]] = set()
    for member, row in rows:
        reason = next(((f.what, f.place) for f in _counted(member)), ("unreadable", member.unreadable))
        if everything or ((len(row) > WIDTH or len(_counted(member)) > 1) and reason not in seen):
            lines += _details(member, everything)
        seen.add(reason)
    for label, told in (("first bad", history.story[:1]), ("then", history.story[1:]), ("before it", history.growth), ("note", history.notes)):
        lines += [line for item in told for line in wrap(f"{label}: {item}")]
    verb = "would be moved" if dry_run else "moved"
    return lines + [line for a, b in history.moved for line in wrap(f"{verb}: {a} to {b}")]


def _details(member: Checked, everything: bool) -> list[str]:
    lines = [f"{name_of(member.path)}:", *_findings(member.findings if everything else _counted(member), everything)]
    if member.unreadable:
        lines += wrap(f"  {member.unreadable}", "  ")
    return lines + (_listed(member) if everything else [])


def _counted(member: Checked) -> list[Finding]:
    return [f for f in member.findings if f.severity is not Severity.NOTE]


def _row(member: Checked, wide: int, digits: int) -> str:
    step = "" if member.step is None else str(member.step)
    worst = "bad" if member.bad else "unread" if member.unreadable else str(member.worst or "ok")
    counted = _counted(member)
    why = member.unreadable or (_said(counted[0]) + (f" (+{len(counted) - 1})" if len(counted) > 1 else "") if counted else "")
    return f"  {step:>{digits}}  {name_of(member.path):<{wide}}  {worst:7}  {why}".rstrip()


def _verdict(report: Report) -> Iterator[str]:
    """Say in the last line what to do next."""
    for history in report.histories:
        yield from _history_verdict(history)
    unreadable = [c for c in report.checked if c.unreadable]
    found = sorted((c for c in report.checked if c.worst is not None), key=_badness, reverse=True)
    if unreadable:
        yield from wrap(f"whynan: {len(unreadable)} of {len(report.checked)} could not be read")
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        codes = [f.code for c in found for f in c.findings if f.code and f.severity is not Severity.NOTE]
        yield from wrap(f"whynan: {name_of(found[0].path)} {_called(found[0])}{more}")
        yield from [f"        whynan explain {codes[0]}"] if codes else []
    if report.ok and not report.histories:
        yield f"whynan: nothing found in {count(len(report.checked))} checked"


def _called(checked: Checked) -> str:
    if checked.worst is not Severity.BAD:
        return "should be looked at"
    said = {Kind.DATA: "holds rows that break a training", Kind.LOG: "shows a training that went bad"}
    return said.get(checked.kind, "must not be used as it is") if checked.kind else "must not be used as it is"


def _history_verdict(history: History) -> Iterator[str]:
    """The command stands on a line of its own, never wrapped: it is there to be copied."""
    bad = sum(m.bad for m in history.members)
    newest = ", the newest" if history.members and history.members[-1].path == history.last_healthy else ""
    if not history.last_healthy:
        yield from wrap(f"whynan: none of the {len(history.members)} checkpoints in {history.folder} is healthy")
    elif not bad:
        yield from wrap(f"whynan: last healthy: {name_of(history.last_healthy)}{newest}")
    elif history.moved:
        yield from wrap(f"whynan: last healthy: {name_of(history.last_healthy)}; resume from it")
    else:
        yield from wrap(f"whynan: last healthy: {name_of(history.last_healthy)}; resume from it; to move the {bad} bad aside:")
        yield f"        whynan check {shlex.quote(history.folder)} --quarantine DIR"
