"""What lint says of a place in a file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_ORDER = ("low", "medium", "high")


class Severity(StrEnum):
    """How much harm it does where it happens."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def rank(self) -> int:
        return _ORDER.index(self)


class Confidence(StrEnum):
    """How sure lint is that it can happen."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def rank(self) -> int:
        return _ORDER.index(self)

    def lowered(self) -> Confidence:
        """One step less sure.

        >>> Confidence.HIGH.lowered()
        <Confidence.MEDIUM: 'medium'>
        """
        return Confidence(_ORDER[max(self.rank - 1, 0)])


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of source; lines count from 1, columns from 0, in characters."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in a file."""

    place: Place
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of the source. Safe: the same mathematics, computed without the hazard."""

    edits: tuple[Edit, ...]
    safe: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One hazard at one place."""

    path: str
    place: Place
    code: str
    slug: str
    title: str
    label: str  # the arithmetic at that spot
    help: str  # one change
    severity: Severity
    confidence: Confidence
    note: str = ""
    origin: Place | None = None  # where the value came from, or where it strikes
    origin_label: str = ""
    fix: Fix | None = None
    cell: int = 0  # cell of a notebook, from 1; lines then count within the cell

    @property
    def weight(self) -> tuple[int, int]:
        """Larger is more likely to break a run: sureness first."""
        return (self.confidence.rank, self.severity.rank)
