"""What the page is made of.

>>> Remark(Grade.BAD, "anomaly mode is left on", "train.py", 12).where
'train.py:12'
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from whynan.records import Json, jsonable


class Grade(StrEnum):
    """How much a remark says."""

    BAD = "bad"  # hides, causes or multiplies the damage: the exit status is 1
    NOTE = "note"  # worth knowing
    UNREAD = "unread"  # a file that could not be read


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing to know."""

    grade: Grade
    text: str
    file: str = ""
    line: int = 0
    advice: str = ""

    @property
    def where(self) -> str:
        """The place, where it has one."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Page:
    """The answer of `whynan doctor`; its repr is the page."""

    sections: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]  # title, rows of name and value
    remarks: tuple[Remark, ...] = ()
    files: int = 0  # of the project that were read

    @property
    def status(self) -> int:
        """The exit status: 1 where something known to be bad was found."""
        return int(any(r.grade is Grade.BAD for r in self.remarks))

    def to_json(self) -> Json:
        """Return the page as JSON."""
        return {"schema": 1, **{t: dict(rows) for t, rows in self.sections}, "files": self.files, "remarks": [jsonable(r) for r in self.remarks]}

    def __repr__(self) -> str:
        from whynan.doctoring.page import text

        return text(self)
