"""From what was gathered to what is said: every finding with its rows, and what it would do to a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whynan.forensics.data.labels import judge_ids, judge_labels
from whynan.forensics.data.marks import Marks, batches_in, filled_when_shuffled
from whynan.forensics.data.roles import Role, is_weight
from whynan.forensics.data.sameness import Duplicates
from whynan.forensics.data.saying import amount, expected, filled_text, finding, met_text, rows_text
from whynan.forensics.data.tables import Sort
from whynan.forensics.data.tally import Tally
from whynan.forensics.findings import Finding, Severity
from whynan.records import Json, count, number

_FLOAT32_MAX = 3.4028234e38
_WIDE = 64  # features from which a column is more likely a picture or a bag of words than a list of measurements


def judge_column(tally: Tally, rows: int) -> Iterator[Finding]:
    """Yield what is wrong in one column."""
    yield from _not_finite(tally, rows)
    yield from _missing(tally, rows)
    yield from _outside(tally, rows)
    yield from _constant(tally, rows)
    yield from _empty_and_padded(tally, rows)
    yield from judge_ids(tally, rows)
    if tally.role is Role.LABEL or tally.column.classes:
        yield from judge_labels(tally, rows)


def _not_finite(tally: Tally, rows: int) -> Iterator[Finding]:
    if tally.bad.count:
        if tally.neginf and not tally.nan and not tally.posinf and tally.low == tally.high == 0:
            yield finding(Severity.NOTE, "mask", tally, tally.bad, "holds 0 and -inf only: taken for a mask")
            return
        held = ", ".join(f"{count(n)} {word}" for n, word in ((tally.nan, "nan"), (tally.posinf, "inf"), (tally.neginf, "-inf")) if n)
        code = "WN702" if tally.role is Role.LABEL else "WN701"
        message = f"{amount(tally.bad, 'row holds', 'rows hold')} nan or inf ({held}): {rows_text(tally.bad)}; {met_text(tally.bad, rows)}"
        yield finding(Severity.BAD, "not-finite", tally, tally.bad, message, code)
    elif tally.column.dtype in ("float64", "double") and max(abs(tally.low), abs(tally.high)) > _FLOAT32_MAX and tally.numbers:
        largest = number(max(abs(tally.low), abs(tally.high)))
        yield Finding(Severity.SUSPECT, "too-large", f"values up to {largest} become inf as float32", tally.column.name, "WN701")


def _missing(tally: Tally, rows: int) -> Iterator[Finding]:
    marks = tally.missing
    if not marks.count:
        return
    if tally.column.sort in (Sort.TEXT, Sort.OTHER) and tally.role is not Role.LABEL:
        yield finding(Severity.NOTE, "missing", tally, marks, f"{amount(marks, 'row has', 'rows have')} no value: {rows_text(marks)}")
        return
    code = "WN702" if tally.role is Role.LABEL else "WN701"
    message = f"{amount(marks, 'row has', 'rows have')} no value, which becomes nan in a tensor: {rows_text(marks)}; {met_text(marks, rows)}"
    yield finding(Severity.SUSPECT, "missing", tally, marks, message, code)


def _outside(tally: Tally, rows: int) -> Iterator[Finding]:
    if tally.range is not None and tally.outside.count:
        low, high = map(number, tally.range)
        message = (
            f"{amount(tally.outside, 'row has', 'rows have')} values outside {low}:{high} (they reach from {number(tally.low)} to {number(tally.high)}): "
            f"{rows_text(tally.outside)}; {met_text(tally.outside, rows)}"
        )
        yield finding(Severity.BAD, "out-of-range", tally, tally.outside, message, "WN703")


def _constant(tally: Tally, rows: int) -> Iterator[Finding]:
    constancy = tally.constancy
    if not constancy.all_same or rows < 8 or constancy.value is None or tally.missing.count * 2 > rows:
        return
    shape = tally.column.shape
    if shape is None or tally.column.sort in (Sort.BOOL, Sort.OTHER) or tally.role in (Role.TOKENS, Role.MASK):
        if tally.column.sort is not Sort.BOOL and constancy.whole and not tally.empty.count:
            yield Finding(Severity.NOTE, "constant-column", "every row is the same", tally.column.name)
    elif shape == () and not (tally.column.classes and tally.high == -1):  # how the labels of a test split are hidden
        what = number(float(constancy.value[0])) if tally.column.numeric else "the same"
        severity = Severity.NOTE if is_weight(tally.column) else Severity.SUSPECT
        yield Finding(severity, "constant-column", f"every value is {what}", tally.column.name, values={"value": what})
    elif len(shape) == 1 and constancy.left is not None and tally.role is not Role.LABEL:
        yield _constant_features(tally, constancy.left.tolist(), shape[0])


def _constant_features(tally: Tally, features: list[int], width: int) -> Finding:
    listed = ", ".join(map(str, features[:8])) + (f" and {count(len(features) - 8)} more" if len(features) > 8 else "")
    plural = "s" * (len(features) > 1)
    message = f"{count(len(features))} of {count(width)} columns {'have' if plural else 'has'} one value in every row: column{plural} {listed}"
    natural = _opens_or_closes(features, width) if tally.column.sort is Sort.INTEGER else _looks_like_background(tally, features, width)
    severity = Severity.NOTE if natural else Severity.SUSPECT
    return Finding(severity, "constant-column", message, tally.column.name, values={"columns": list(features[:64])})


def _opens_or_closes(features: list[int], width: int) -> bool:
    """Lists of ids begin and end with the same token; long ones are pictures or padded."""
    return width >= _WIDE // 2 or set(features) <= {0, width - 1}


def _looks_like_background(tally: Tally, features: list[int], width: int) -> bool:
    """Pictures have borders that never change and sparse features never occur: both sit at the least or the greatest value of all."""
    values = tally.constancy.value
    assert values is not None
    held = {float(values[f]) for f in features}
    return (
        width >= _WIDE
        and len(held) <= 4
        and held <= {tally.low, tally.high, 0.0}
        and (0.0 not in held or 0.0 in (tally.low, tally.high) or len(features) * 20 >= width)
    )


def _empty_and_padded(tally: Tally, rows: int) -> Iterator[Finding]:
    name, role = tally.column.name, tally.role
    if tally.empty.count:
        text = tally.column.sort is Sort.TEXT
        severity = Severity.SUSPECT if role is Role.TOKENS else Severity.NOTE
        message = f"{amount(tally.empty, 'row is', 'rows are')} empty: {rows_text(tally.empty)}"
        yield finding(severity, "empty-text" if text else "empty-rows", tally, tally.empty, message, "WN402" if severity is Severity.SUSPECT else "")
    if tally.padded.count:
        yield from _padded(tally, rows)
    elif tally.zero.count and not tally.column.scalar:
        if role is Role.MASK:
            batches = filled_text(tally.zero, rows, "would hold no other")
            message = f"{amount(tally.zero, 'row has', 'rows have')} no token that counts: {rows_text(tally.zero)}; {batches}"
            yield finding(Severity.SUSPECT, "all-padding", tally, tally.zero, message, "WN402")
        elif tally.column.sort is not Sort.BOOL and role is not Role.LABEL and not tally.low == tally.high == 0:
            yield Finding(
                Severity.NOTE,
                "all-zero-rows",
                f"{amount(tally.zero, 'row is', 'rows are')} all zeros: {rows_text(tally.zero)}",
                name,
                "",
                tuple(tally.zero.first),
                tally.zero.count,
            )
    if tally.unlabelled.count and not tally.column.scalar:
        message = f"{amount(tally.unlabelled, 'row has', 'rows have')} only ignored labels ({number(tally.ignored)}): {rows_text(tally.unlabelled)}"
        yield finding(Severity.SUSPECT, "all-ignored", tally, tally.unlabelled, message, "WN402")
    yield from _all_ignored(tally, rows)


def _padded(tally: Tally, rows: int) -> Iterator[Finding]:
    assert tally.padding is not None
    what = (
        f"the value {number(tally.padding)}, which ends most rows and so is most likely padding (a guess: say --padding)"
        if tally.guessed
        else f"padding ({number(tally.padding)})"
    )
    batches = filled_text(tally.padded, rows, "would hold nothing else")
    message = f"{amount(tally.padded, 'row holds', 'rows hold')} only {what}: {rows_text(tally.padded)}; {batches}"
    yield finding(Severity.NOTE if tally.guessed else Severity.SUSPECT, "all-padding", tally, tally.padded, message, "" if tally.guessed else "WN402")


def _all_ignored(tally: Tally, rows: int) -> Iterator[Finding]:
    filled = tally.unlabelled.filled(rows)
    if not filled:
        return
    shuffled = filled_when_shuffled(rows, tally.unlabelled.count, tally.unlabelled.batch)
    if tally.unlabelled.count == rows and tally.column.scalar and tally.ignored == -100:
        text = "every label is ignored"
    else:
        text = filled_text(tally.unlabelled, rows, "would have only ignored labels")
    values: dict[str, Json] = {"batches": filled, "of": batches_in(rows, tally.unlabelled.batch), "shuffled": shuffled, "first": tally.unlabelled.first_filled}
    yield replace(finding(Severity.BAD, "all-ignored-batch", tally, tally.unlabelled, f"{text}: the mean of their loss is 0 / 0", "WN402"), values=values)


def judge_batches(marks: Marks, rows: int, largest: int) -> Iterator[Finding]:
    """Yield the batches in which every row is the same; `largest` is the size of the largest group of equal rows, 0 where it was not counted."""
    batch = marks.batch
    filled = marks.filled(rows, least=2)
    if not filled or batch < 2 or rows < 2:
        return
    shuffled = filled_when_shuffled(rows, largest, batch, least=2) if largest else None
    low, high = marks.first_filled * batch, min(rows, (marks.first_filled + 1) * batch) - 1
    message = (
        f"{count(filled)} of {count(batches_in(rows, batch))} batches of {batch} would be constant in file order (the first: rows {low} to {high})"
        f"{f'; {expected(shuffled)} when shuffled' if shuffled is not None else ''}"
    )
    yield Finding(
        Severity.SUSPECT,
        "constant-batch",
        message,
        "",
        "WN404",
        tuple(range(low, min(high + 1, low + 8))),
        high - low + 1,
        values={"batches": filled, "of": batches_in(rows, batch), "shuffled": shuffled},
    )


def judge_duplicates(found: Duplicates, rows: int, tallies: list[Tally]) -> Iterator[Finding]:
    """Yield the rows that are there twice, unless that is to be expected of such rows."""
    if not found.count:
        return
    pairs = ", ".join(f"{a} is {b}" for a, b in zip(found.rows[:4], found.originals, strict=False))
    about = "" if found.share == 1 else f"about (one row in {round(1 / found.share)} could be remembered) "
    plural = "rows repeat" if found.count > 1 else "row repeats"
    message = f"{about}{count(found.count)} {plural} an earlier one: row {pairs}" + (", …" if found.count > 4 else "")
    yield Finding(_gravity(found, rows, tallies), "duplicate-rows", message, "", "", tuple(found.rows), found.count, values={"repeat": list(found.originals)})


def _gravity(found: Duplicates, rows: int, tallies: list[Tally]) -> Severity:
    """Rows made of few possible values repeat by nature: the square root of all combinations allows for columns that go together."""
    room = 1.0
    for tally in tallies:
        room = min(1e60, room * tally.variety)
    by_nature = rows * rows / (2 * room**0.5)
    measured = any(t.column.sort is Sort.FLOAT and t.fractions and t.variety >= min(rows, 256) / 2 for t in tallies)
    rare = found.count * 200 < rows and not measured
    return Severity.NOTE if by_nature >= 1 or rare else Severity.SUSPECT


def merged(findings: list[Finding], most: int = 8) -> list[Finding]:
    """Say once what holds of many columns."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.severity, one.what, one.code), []).append(one)
    return [f for group in groups.values() for f in (group if len(group) <= most else [_merge(group)])]


def _merge(group: list[Finding]) -> Finding:
    names = ", ".join(f.place for f in group[:6])
    first = group[0]
    message = f"{count(len(group))} columns ({names}, …): in {first.place}, {first.message}"
    return replace(first, place="", message=message, row_count=max(f.row_count for f in group), values={"columns": [f.place for f in group[:256]]})
