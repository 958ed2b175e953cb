"""Ids and labels: what indexes a table must be whole, not negative, and below its end."""

from __future__ import annotations

from collections.abc import Iterator

from whynan.forensics.data.roles import Role
from whynan.forensics.data.saying import amount, finding, met_text, rows_text
from whynan.forensics.data.tables import Sort
from whynan.forensics.data.tally import Tally
from whynan.forensics.findings import Finding, Severity
from whynan.records import count, number

_EXACT = {"float16": 2048, "halffloat": 2048, "bfloat16": 256, "float32": 2**24, "float": 2**24}  # whole numbers beyond this are rounded


def judge_ids(tally: Tally, rows: int) -> Iterator[Finding]:
    """Yield ids that cannot index a table."""
    if tally.role is Role.TOKENS and tally.column.sort is Sort.FLOAT and tally.numbers:
        yield from _float_ids(tally)
    if not tally.negative.count or tally.range is not None or tally.role is Role.LABEL or tally.role is Role.NUMBERING:
        return
    below = {v for v in tally.negatives if v != tally.padding}
    if below:
        listed = ", ".join(number(v) for v in sorted(below)[:4])
        message = f"{amount(tally.negative, 'row has', 'rows have')} negative ids ({listed}): {rows_text(tally.negative)}; {met_text(tally.negative, rows)}"
        severity = _gravity(tally, rows, below)
        if severity is not None:
            yield finding(severity, "negative-id", tally, tally.negative, message, "WN703" if severity is not Severity.NOTE else "")


def _gravity(tally: Tally, rows: int, below: set[float]) -> Severity | None:
    """Named ids must not be negative; a nameless table of whole numbers is only suspect where that is rare."""
    if tally.role is Role.TOKENS:
        return Severity.BAD
    if tally.role is Role.KEY:
        return Severity.SUSPECT
    if tally.role is Role.MASK or tally.negative.count * 10 > rows or len(below) > 8:
        return None
    return Severity.NOTE if below <= {-1, tally.ignored} else Severity.SUSPECT


def _float_ids(tally: Tally) -> Iterator[Finding]:
    name, dtype = tally.column.name, tally.column.dtype
    if tally.fractions:
        yield Finding(Severity.SUSPECT, "float-ids", f"ids stored as {dtype}, and not all of them are whole", name, "WN703")
    elif tally.high > _EXACT.get(dtype.removeprefix("list<element: ").rstrip(">"), 2**53):
        yield Finding(Severity.SUSPECT, "float-ids", f"ids up to {number(tally.high)} stored as {dtype}, which rounds them", name, "WN703")
    else:
        yield Finding(Severity.NOTE, "float-ids", f"ids stored as {dtype}", name)


def judge_labels(tally: Tally, rows: int) -> Iterator[Finding]:
    """Yield labels that belong to no class, and classes nobody has."""
    if tally.column.sort is not Sort.INTEGER or tally.range is not None:
        return
    if tally.values is None:
        yield from _below_zero_in_lists(tally)
        return
    values = {int(v) for v in tally.values} - {int(tally.ignored)}
    if tally.column.classes:
        yield from _declared(tally, values)
        return
    classes, below = {v for v in values if v >= 0}, {v for v in values if v < 0}
    if not _looks_like_classes(classes, below, rows):
        return
    if below:
        listed = ", ".join(map(str, sorted(below)))
        message = f"labels {listed} beside classes {min(classes)} to {max(classes)}: {amount(tally.negative, 'row', 'rows')}, {rows_text(tally.negative)}"
        severity = Severity.BAD if tally.negative.count * 100 < rows else Severity.SUSPECT  # more of them may be whole numbers of a regression
        yield finding(severity, "label-out-of-range", tally, tally.negative, message, "WN703")
    gaps = sorted(set(range(max(classes) + 1)) - classes)
    if gaps and len(classes) > 1:
        listed = ", ".join(map(str, gaps[:6])) + (", …" if len(gaps) > 6 else "")
        yield Finding(Severity.NOTE, "class-gaps", f"labels reach from {min(classes)} to {max(classes)}, and no row has {listed}", tally.column.name)


def _below_zero_in_lists(tally: Tally) -> Iterator[Finding]:
    """Labels of tokens: one or two negative values beside the ignored one are no regression. -1 is the ignored one of some."""
    if tally.column.scalar or not 0 < len(tally.negatives) <= 2:
        return
    listed = ", ".join(number(v) for v in sorted(tally.negatives))
    held = f"{amount(tally.negative, 'row has', 'rows have')} labels {listed}, which are not the ignored one ({number(tally.ignored)})"
    message = f"{held}: {rows_text(tally.negative)}"
    severity = Severity.SUSPECT if tally.negatives == {-1} else Severity.BAD
    yield finding(severity, "label-out-of-range", tally, tally.negative, message, "WN703")


def _declared(tally: Tally, values: set[int]) -> Iterator[Finding]:
    outside = sorted(v for v in values if not 0 <= v < tally.column.classes)
    if not outside:
        return
    hidden = values == {-1}  # how test splits are published
    listed = ", ".join(map(str, outside[:6]))
    message = f"{count(len(outside))} labels outside the {tally.column.classes} classes it declares: {listed}"
    yield Finding(Severity.NOTE if hidden else Severity.BAD, "label-out-of-range", message, tally.column.name, "" if hidden else "WN703")


def _looks_like_classes(classes: set[int], below: set[int], rows: int) -> bool:
    """Classes are few and dense; whole numbers of a regression are neither. -1 and 1 are the two classes of a hinge loss."""
    if not classes or len(below) > 2 or (below == {-1} and classes <= {0, 1} and 0 not in classes) or (below == {-1} and classes == {0, 1}):
        return False
    return len(classes) <= max(2, rows // 4) and max(classes) < 4 * len(classes) + 8
