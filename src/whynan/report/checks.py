"""The report of `whynan check`: for a terminal, as JSON, as annotations on GitHub."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence

from whynan.forensics.checkpoints.roles import Role, role_of
from whynan.forensics.findings import Change, Checked, Comparison, Finding, History, Kind, Report, Severity
from whynan.records import count, number

WIDTH = 80
_SHOWN = 6  # findings of one file; with --all every one
_CHANGES = 8
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LEVELS = {Severity.BAD: "error", Severity.SUSPECT: "warning"}


def text(report: Report, everything: bool = False) -> str:
    """Return the report for a terminal, 80 columns wide, the worst last, where the eye is; the verdict ends it."""
    blocks = [
        *(_checked(c, everything) for c in sorted(report.checked, key=_badness)),
        *(_history(h, report.dry_run, everything) for h in report.histories),
        *_comparisons(report.comparisons),
        [line for note in report.notes for line in _wrap(f"note: {note}")],
        list(_verdict(report)),
    ]
    return "\n\n".join("\n".join(map(printable, block)) for block in blocks if block)


def show(report: Report, everything: bool = False) -> None:
    """Print the report on stdout, in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
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


def github(report: Report) -> str:
    """Return one annotation a line, as GitHub Actions reads them.

    >>> from whynan.forensics.findings import Checked
    >>> print(github(Report((Checked("a,b.pt", findings=(Finding(Severity.BAD, "not-finite", "100% nan", "w", "WN601"),)),))))
    ::error file=a%2Cb.pt,title=WN601 not-finite::w: 100%25 nan
    """
    everything = (*report.checked, *(m for h in report.histories for m in h.members))
    return "\n".join(line for checked in everything for line in _annotations(checked))


def _annotations(checked: Checked) -> Iterator[str]:
    if checked.unreadable:
        yield _annotation("error", checked.path, "cannot be read", checked.unreadable, 0)
    for finding in checked.findings:
        if finding.severity in _LEVELS:
            message = f"{finding.place}: {finding.message}" if finding.place else finding.message
            yield _annotation(_LEVELS[finding.severity], checked.path, f"{finding.code} {finding.what}".strip(), message, finding.line)


def _annotation(level: str, path: str, title: str, message: str, line: int) -> str:
    where = f"file={_escape_property(path)}" + (f",line={line}" if line else "")
    return f"::{level} {where},title={_escape_property(title)}::{_escape(message)}"


def _escape(value: str) -> str:
    return printable(value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _escape_property(value: str) -> str:
    return _escape(value).replace(":", "%3A").replace(",", "%2C")


def printable(line: str) -> str:
    r"""Make control characters visible: a name in a file must not steer the terminal.

    >>> printable("layer\x1b[31m.weight")
    'layer\\x1b[31m.weight'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


def size_text(size: int) -> str:
    """Print a size in bytes.

    >>> size_text(1234567), size_text(12)
    ('1.2 MB', '12 bytes')
    """
    return next((f"{size / unit:.1f} {name}" for name, unit in _UNITS if size >= unit), f"{size} bytes")


def _badness(checked: Checked) -> int:
    return 3 if checked.unreadable else {Severity.BAD: 2, Severity.SUSPECT: 1, None: 0, Severity.NOTE: 0}[checked.worst]


def _wrap(line: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def _checked(checked: Checked, everything: bool) -> list[str]:
    about = [str(checked.kind or ""), checked.form, size_text(checked.size) if checked.size else ""]
    about += [f"step {checked.step}" if checked.step is not None else "", _tensors(checked)]
    lines = _wrap(f"{checked.path}  {', '.join(a for a in about if a)}".rstrip())
    if checked.unreadable:
        lines += _wrap(f"  unreadable  {checked.unreadable}", " " * 14)
    lines += _findings(checked.findings, everything)
    if not checked.findings and not checked.unreadable:
        lines.append("  nothing found")
    if everything:
        lines += [f"  {t.name}  {t.line()}" for t in checked.tensors]
    if checked.plot:
        lines += checked.plot.splitlines()
    return lines


def _tensors(checked: Checked) -> str:
    word = "column" if checked.kind is Kind.DATA else "tensor"
    return f"{count(len(checked.tensors))} {word}{'s' * (len(checked.tensors) != 1)}" if checked.tensors else ""


def _findings(findings: Sequence[Finding], everything: bool) -> list[str]:
    """Several like each other are counted after the first few."""
    shown = findings if everything else findings[:_SHOWN]
    lines = [line for f in shown for line in _wrap(f"  {f.severity:8}{_said(f)}", " " * 10)]
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
    bad = [m for m in history.members if not m.healthy]
    lines = _wrap(f"{history.folder}  {len(history.members)} checkpoints, {len(bad)} bad")
    wide = min(max((len(_name(m.path)) for m in history.members), default=0), 36)
    digits = max((len(str(m.step)) for m in history.members if m.step is not None), default=1)
    rows = [(m, _row(m, wide, digits)) for m in history.members]
    lines += [row if len(row) <= WIDTH else row[: WIDTH - 1] + "…" for _, row in rows]
    for member, row in rows:
        if everything or len(row) > WIDTH or len(_counted(member)) > 1:
            lines += _details(member, everything)
    for label, told in (("first bad", history.story[:1]), ("then", history.story[1:]), ("note", history.notes)):
        lines += [line for item in told for line in _wrap(f"{label}: {item}")]
    verb = "would be moved" if dry_run else "moved"
    return lines + [line for a, b in history.moved for line in _wrap(f"{verb}: {a} to {b}")]


def _details(member: Checked, everything: bool) -> list[str]:
    lines = [f"{_name(member.path)}:", *_findings(member.findings if everything else _counted(member), everything)]
    if member.unreadable:
        lines += _wrap(f"  {member.unreadable}", "  ")
    return lines + ([f"  {t.name}  {t.line()}" for t in member.tensors] if everything else [])


def _counted(member: Checked) -> list[Finding]:
    return [f for f in member.findings if f.severity is not Severity.NOTE]


def _row(member: Checked, wide: int, digits: int) -> str:
    step = "" if member.step is None else str(member.step)
    worst = "bad" if not member.healthy else str(member.worst or "ok")
    counted = _counted(member)
    why = member.unreadable or (_said(counted[0]) + (f" (+{len(counted) - 1})" if len(counted) > 1 else "") if counted else "")
    return f"  {step:>{digits}}  {_name(member.path):<{wide}}  {worst:7}  {why}".rstrip()


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _comparisons(comparisons: Sequence[Comparison]) -> Iterator[list[str]]:
    if len(comparisons) == 1:
        yield list(_comparison(comparisons[0]))
    elif comparisons:
        from whynan.forensics.checkpoints.comparing import where_growth_began

        lines = ["update ratios: norm of the change over the norm before it"]
        lines += [_pair(c) for c in comparisons]
        yield lines + [line for told in where_growth_began(comparisons) for line in _wrap(told)]


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield from _wrap(f"{comparison.path} against {comparison.against}")
    if comparison.unreadable:
        yield f"  unreadable  {comparison.unreadable}"
        return
    own = [c for c in comparison.changes if role_of(c.name) in (Role.WEIGHT, Role.BUFFER)] or list(comparison.changes)
    moved, still = [c for c in own if not c.unchanged], [c for c in own if c.unchanged]
    shown = sorted(moved, key=lambda c: (c.ratio is not None or c.largest is not None, -(c.ratio or 0.0)))
    yield from (_change(c) for c in shown[:_CHANGES])
    if len(moved) > _CHANGES:
        yield f"  and {len(moved) - _CHANGES} more changed by less"
    for label, names in (("unchanged", [c.name for c in still]), ("appeared", comparison.appeared), ("vanished", comparison.vanished)):
        if names:
            yield from _wrap(f"  {label} {len(names)}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}", "    ")


def _change(change: Change) -> str:
    if change.ratio is None and change.largest is None:
        return f"  {change.name}  {change.note}"
    ratio = number(change.ratio) if change.ratio is not None else "from zero"
    return f"  {ratio:>10}  {change.name}  largest change {number(change.largest or 0.0)}" + (f"  ({change.note})" if change.note else "")


def _pair(comparison: Comparison) -> str:
    pair = f"  {_name(comparison.against)} to {_name(comparison.path)}"
    weights = [c for c in comparison.changes if c.ratio is not None and role_of(c.name) is Role.WEIGHT]
    top = next(iter(weights), None)
    if comparison.unreadable or top is None:
        return f"{pair}  {comparison.unreadable or ('all from zero' if comparison.changes else 'nothing in common')}"
    return f"{pair}  largest {number(top.ratio or 0.0)}  {top.name}"


def _verdict(report: Report) -> Iterator[str]:
    """Say in the last line what to do next."""
    for history in report.histories:
        yield from _history_verdict(history)
    unreadable = [c for c in report.checked if c.unreadable]
    found = sorted((c for c in report.checked if c.worst is not None), key=_badness, reverse=True)
    if unreadable:
        yield from _wrap(f"whynan: {len(unreadable)} of {len(report.checked)} could not be read")
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        codes = [f.code for c in found for f in c.findings if f.code and f.severity is not Severity.NOTE]
        yield from _wrap(f"whynan: {_name(found[0].path)} {_called(found[0])}{more}")
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
    bad = sum(not m.healthy for m in history.members)
    if not history.last_healthy:
        yield from _wrap(f"whynan: none of the {len(history.members)} checkpoints in {history.folder} is healthy")
    elif not bad:
        yield from _wrap(f"whynan: last healthy: {_name(history.last_healthy)}, the newest")
    elif history.moved:
        yield from _wrap(f"whynan: last healthy: {_name(history.last_healthy)}; resume from it")
    else:
        yield from _wrap(f"whynan: last healthy: {_name(history.last_healthy)}; resume from it; to move the {bad} bad aside:")
        yield f"        whynan check {shlex.quote(history.folder)} --quarantine DIR"
