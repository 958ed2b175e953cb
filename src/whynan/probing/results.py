"""What a probe gives: a verdict for each group, findings with the diagnosis of the core, notes; and their text.

Attack ─► Finding ─┐
                   ├─► Verdict (one group) ─► Probed ─► text, JSON
        Note ──────┘
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace
from enum import StrEnum

from whynan.records import Incident, Json, jsonable
from whynan.report import cells, terminal

WIDTH = 80


class Group(StrEnum):
    """The groups, in the order they are told."""

    FORWARD = "forward"
    LOSS = "loss"
    GRADIENT = "gradient flow"
    RATE = "learning rate"  # only where an optimizer or a rate is given
    STABILITY = "numerical stability"
    EDGES = "edge cases"
    SEARCH = "search"
    RANGES = "ranges"


class Level(StrEnum):
    """How much something found says."""

    FINDING = "finding"
    NOTE = "note"  # outside the stated ranges, or not an error: does not change the exit status
    REFUSED = "refused"  # the user's own code said no


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that came to light, and what brought it there."""

    level: Level
    group: Group
    attack: str
    text: str
    incident: Incident | None = None
    change: str = ""  # the smallest change of input or weights that does it
    capsule: str = ""
    also: tuple[str, ...] = ()  # other attacks that end at the same line

    @property
    def origin(self) -> tuple[str, int]:
        """Where the damage is born; attacks that share it are told once."""
        span = self.incident.origin.span if self.incident is not None else None
        return (span.file, span.line) if span is not None and span.known else ("", 0)

    @property
    def code(self) -> str:
        """The code of the cause, where there is one."""
        return self.incident.cause.code if self.incident is not None else ""

    def line(self) -> str:
        """Say it in one line."""
        return f"{self.attack}: {self.text}" + (f" ({self.code} {self.where})" if self.incident is not None else "")

    @property
    def where(self) -> str:
        """Say where the damage is born: a line of the user's, or a module."""
        file, number = self.origin
        module = self.incident.origin.module if self.incident is not None else ""
        return f"at {file}:{number}" if number else f"in module {module!r}" if module else "in code of torch"

    def to_json(self) -> Json:
        """Return it as JSON values."""
        plain = {k: jsonable(getattr(self, k)) for k in ("level", "group", "attack", "text", "change", "capsule", "also")}
        return {**plain, "code": self.code, "file": self.origin[0], "line": self.origin[1], "incident": self.incident.to_json() if self.incident else None}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The line of one group."""

    group: Group
    state: str  # ok, 2 found, 1 note, not run
    text: str


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer of `whynan.probe`; its repr is the report.

    `findings` make the exit status 1; `notes` do not. `ok` is true without findings.
    """

    title: str
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    inputs: tuple[str, ...] = ()
    seconds: float = 0.0
    facts: dict[str, Json] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def status(self) -> int:
        """The exit status: 0 nothing found, 1 findings."""
        return int(bool(self.findings))

    def to_json(self) -> Json:
        """Return the report as JSON without a bare NaN."""
        return {
            "schema": 1,
            "title": self.title,
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "inputs": list(self.inputs),
            "verdicts": [jsonable(v) for v in self.verdicts],
            "findings": [f.to_json() for f in self.findings],
            "notes": [n.to_json() for n in self.notes],
            "facts": jsonable(self.facts),
        }

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return cells.page(repr(self))

    def __repr__(self) -> str:
        return text(self)


def merged(found: list[Finding]) -> list[Finding]:
    """Join what is born at the same line: the strongest and most specific first, the others by name."""
    order = {Level.FINDING: 0, Level.NOTE: 1, Level.REFUSED: 2}
    vague = ("WN503", "WN901")
    kept: dict[tuple[object, ...], Finding] = {}
    for item in sorted(found, key=lambda f: (order[f.level], f.code in vague, f.level is Level.FINDING and not f.change)):
        key: tuple[object, ...] = (*item.origin,) if item.origin[1] else (item.code, item.where) if item.code else (item.group, item.attack, item.text)
        first = kept.get(key)
        if first is None:
            kept[key] = item
        elif item.attack != first.attack and item.attack not in first.also:
            also = (*first.also, item.attack)
            kept[key] = replace(first, also=also, change=first.change or item.change, capsule=first.capsule or item.capsule)
    return list(kept.values())


def text(probed: Probed) -> str:
    """Return the report, 80 columns wide."""
    lines = [f"whynan probe: {probed.title}", *_wrapped("  inputs: ", "; ".join(probed.inputs))]
    for verdict in probed.verdicts:
        lines.append(_cut(f"  {verdict.group:<20} {verdict.state:<8} {verdict.text}"))
    for finding in probed.findings:
        lines += ["", *_told(finding)]
    notes = [n for n in probed.notes if n.level is Level.NOTE]
    if notes:
        lines += ["", "notes (outside the ranges of the inputs, or no error by themselves):"]
        for note in notes[:12]:
            lines += _wrapped("  - ", note.line())
        lines += [f"  … and {len(notes) - 12} more (--format json has all)"] * (len(notes) > 12)
    return "\n".join([*lines, "", _last(probed)])


def _told(finding: Finding) -> list[str]:
    lines = [terminal.diagnosis(finding.incident)] if finding.incident is not None else _wrapped("error: ", finding.text)
    lines += _wrapped("  found by: ", f"{finding.group}: {finding.attack}")
    if finding.change:
        lines += _wrapped("  change:   ", finding.change)
    if finding.also:
        more = f" and {len(finding.also) - 5} more" if len(finding.also) > 5 else ""
        lines += _wrapped("  also by:  ", ", ".join(finding.also[:5]) + more)
    if finding.capsule:
        lines.append(f"  capsule:  whynan replay {finding.capsule}")
    return lines


def _last(probed: Probed) -> str:
    found, notes = len(probed.findings), sum(n.level is Level.NOTE for n in probed.notes)
    words = f"{found} finding{'s' if found != 1 else ''}" if found else "nothing found"
    return f"{words}, {notes} note{'s' if notes != 1 else ''}, {probed.seconds:.1f} s"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _wrapped(head: str, words: str) -> list[str]:
    if not words:
        return []
    return textwrap.wrap(words, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False)
