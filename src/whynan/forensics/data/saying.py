"""How rows and batches are put into words."""

from __future__ import annotations

from whynan.forensics.data.marks import Marks, batches_in, filled_when_shuffled, met_when_shuffled
from whynan.forensics.data.tally import Tally
from whynan.forensics.findings import Finding, Severity
from whynan.records import Json, count, number

_SHOWN = 5


def amount(marks: Marks, one: str, several: str) -> str:
    """Say how many.

    >>> import numpy
    >>> marks = Marks(64); marks.add(numpy.array([3])); amount(marks, "row holds", "rows hold")
    '1 row holds'
    """
    return f"{count(marks.count)} {one if marks.count == 1 else several}"


def rows_text(marks: Marks) -> str:
    """Name the first rows."""
    listed = ", ".join(map(str, marks.first[:_SHOWN]))
    return f"row{'s' * (marks.count > 1)} {listed}" + (", …" if marks.count > _SHOWN else "")


def met_text(marks: Marks, rows: int) -> str:
    """Say how many batches would meet one of these rows."""
    chance = expected(met_when_shuffled(rows, marks.count, marks.batch))
    return f"{count(marks.met)} of {count(batches_in(rows, marks.batch))} batches of {marks.batch} in file order, {chance} when shuffled"


def filled_text(marks: Marks, rows: int, what: str) -> str:
    """Say how many batches would be made of nothing but these rows."""
    batches = batches_in(rows, marks.batch)
    chance = expected(filled_when_shuffled(rows, marks.count, marks.batch))
    return f"{count(marks.filled(rows))} of {count(batches)} batches of {marks.batch} {what} in file order, {chance} when shuffled"


def expected(batches: float) -> str:
    """Say an expected number of batches.

    >>> expected(2.61), expected(0.0004), expected(1e-30)
    ('about 2.6', 'about 0.0004', 'none')
    """
    if batches < 1e-6:
        return "none"
    return f"about {number(round(batches, 1)) if batches >= 0.1 else f'{batches:.1g}'}"


def finding(severity: Severity, what: str, tally: Tally, marks: Marks, message: str, code: str = "") -> Finding:
    """Make a finding about marked rows of a column."""
    return Finding(severity, what, message, tally.column.name, code, tuple(marks.first), marks.count, values=_values(tally, marks))


def _values(tally: Tally, marks: Marks) -> dict[str, Json]:
    rows = max(tally.rows, 1)
    return {
        "batches": marks.met,
        "filled": marks.filled(rows),
        "of": batches_in(rows, marks.batch),
        "shuffled": round(met_when_shuffled(rows, min(marks.count, rows), marks.batch), 4),
    }
