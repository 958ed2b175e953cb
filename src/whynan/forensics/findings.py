"""What a look at a file gives.

Finding, TensorStats ─► Checked (one path) ─┬────────────┬─► Report ─► text, JSON, GitHub
                                            ├─► History ─┤
                               Change ──────┴─► Comparison
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from whynan.records import SCHEMA, Json, TensorStats, jsonable


class Severity(StrEnum):
    """How much a finding says."""

    BAD = "bad"  # this file must not be used as it is
    SUSPECT = "suspect"  # most likely a fault
    NOTE = "note"  # worth knowing; not a finding, does not change the exit status


class Kind(StrEnum):
    """What a path holds."""

    CHECKPOINT = "checkpoint"
    DATA = "data"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found in one file.

    >>> print(Finding(Severity.BAD, "not-finite", "12 nan of 4 096 values", place="model.fc.weight", code="WN601"))
    bad: model.fc.weight: 12 nan of 4 096 values (WN601)
    """

    severity: Severity
    what: str  # a slug of ours: not-finite, all-zero, negative-second-moment, constant-column …
    message: str
    place: str = ""  # a tensor, a column, a series
    code: str = ""  # a cause code, where one fits
    rows: tuple[int, ...] = ()  # rows of data, steps of a log; the first few
    row_count: int = 0
    line: int = 0  # 1-based line of a text file
    values: Mapping[str, Json] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{self.severity}: {where}{self.message}" + (f" ({self.code})" if self.code else "")


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity; those of one severity stay as they are."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda f: order.index(f.severity)))


def last_part(path: str) -> str:
    """Return the last part of a path or address.

    >>> last_part("s3://bucket/run/")
    'run'
    """
    return path.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of one path."""

    path: str
    kind: Kind | None = None
    form: str = ""  # "torch zip", "safetensors, 3 shards", "TensorBoard events"
    size: int = 0
    step: int | None = None  # where it says, or its name does
    findings: tuple[Finding, ...] = ()
    tensors: tuple[TensorStats, ...] = ()
    facts: Mapping[str, Json] = field(default_factory=dict)  # counters, learning rates, rows, columns
    unreadable: str = ""  # why it could not be read; the rest is then what was seen before that
    plot: str = ""  # a curve for the terminal
    damaged: bool = False  # whether it could not be read because it is broken; else it may be whole
    in_folder: bool = False  # whether it was found in a folder, not named itself

    @property
    def name(self) -> str:
        """The last part of its path."""
        return last_part(self.path)

    @property
    def worst(self) -> Severity | None:
        """The worst of its findings that count."""
        found = {f.severity for f in self.findings}
        return next((s for s in (Severity.BAD, Severity.SUSPECT) if s in found), None)

    @property
    def healthy(self) -> bool:
        """Whether it can be used, as far as was seen."""
        return not self.unreadable and self.worst is not Severity.BAD

    @property
    def bad(self) -> bool:
        """Whether it must not be used: one that was only not looked at is neither healthy nor bad."""
        return self.damaged or self.worst is Severity.BAD

    def at(self, path: str) -> Checked:
        """The same under another name."""
        return replace(self, path=path)


@dataclass(frozen=True, slots=True)
class History:
    """The checkpoints of one folder in the order they were written."""

    folder: str
    members: tuple[Checked, ...]
    last_healthy: str = ""
    first_bad: str = ""
    moved: tuple[tuple[str, str], ...] = ()  # from, to; with --dry-run, what would be moved
    story: tuple[str, ...] = ()  # what went bad first, and what after it
    growth: tuple[str, ...] = ()  # tensors that grew up to the first one whose values are bad
    notes: tuple[str, ...] = ()  # links, copies, what could not be looked at or moved


@dataclass(frozen=True, slots=True)
class Change:
    """How one tensor differs between two checkpoints."""

    name: str
    ratio: float | None = None  # norm of the difference over the norm of the older one, where both are finite
    largest: float | None = None  # the largest absolute change
    note: str = ""  # another shape or dtype, values that are not finite

    @property
    def unchanged(self) -> bool:
        """Whether not one value differs."""
        return self.largest == 0.0 and not self.note


@dataclass(frozen=True, slots=True)
class Comparison:
    """What happened between two checkpoints."""

    path: str
    against: str  # the older one
    changes: tuple[Change, ...]  # the largest ratio first
    appeared: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    unreadable: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of `whynan.check`; its repr is the report."""

    checked: tuple[Checked, ...]
    histories: tuple[History, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()  # what was passed over
    dry_run: bool = False
    growth: tuple[str, ...] = ()  # from which comparison on the updates of a tensor grew

    @property
    def ok(self) -> bool:
        """Whether nothing was found and everything was read."""
        return self.status == 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found that counts."""
        everything = (*self.checked, *(m for h in self.histories for m in h.members))
        return tuple(f for c in everything for f in c.findings if f.severity is not Severity.NOTE)

    @property
    def status(self) -> int:
        """The exit status: 2 where a path that was named could not be read; inside a folder, one that cannot be read is a finding."""
        if any(c.unreadable and not c.in_folder for c in self.checked) or any(c.unreadable for c in self.comparisons):
            return 2
        members = (m for h in self.histories for m in h.members)
        return int(bool(self.findings) or any(c.unreadable for c in (*self.checked, *members)))

    def to_json(self) -> dict[str, Json]:
        """Return the report as JSON without a bare NaN."""
        told = {f.name: jsonable(getattr(self, f.name)) for f in fields(self)}
        return {"schema": SCHEMA, "status": self.status, **told}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from whynan.report import cells

        return cells.page(repr(self))

    def __repr__(self) -> str:
        from whynan.report.checks import text

        return text(self)
