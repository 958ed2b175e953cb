"""How text is written: its encoding, and what parts the columns of a table."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Sequence

LONGEST_LINE = 1 << 26
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def encoding_of(head: bytes) -> str | None:
    r"""Say how text is encoded where a mark or its zeros tell; None where nothing does: UTF-8, or older than that.

    >>> encoding_of(b"\xff\xfea\0"), encoding_of("loss 1.5".encode("utf-16-be")), encoding_of(b"loss 1.5")
    ('utf-16', 'utf-16-be', None)
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    even, odd = head[0:4096:2].count(0), head[1:4096:2].count(0)
    if max(even, odd) > 0.4 * len(head[:4096]) / 2 and min(even, odd) < max(even, odd) // 4:
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def delimiter_of(lines: Sequence[str], among: str = ",\t;| ") -> str:
    """Take the sign that cuts most lines into as many cells as the first one, more than one; spaces only where nothing else does.

    >>> delimiter_of(["epoch;loss;val_loss"]), delimiter_of(["a b", "1 2"])
    (';', ' ')
    """

    def fit(delimiter: str) -> tuple[bool, bool, bool, int]:
        counts = [len(row) for row in parse(lines, delimiter) if row]
        usual = max(set(counts), key=counts.count, default=1)
        share = counts.count(usual) / len(counts) if counts and usual > 1 else 0.0
        return share > 0.5 and delimiter != " ", share > 0.5 and counts[0] == usual, share > 0.9, usual if share > 0.5 else 0

    best = max(among, key=fit)
    return best if fit(best)[3] else ","


def parse(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """Cut lines into cells, up to the first that cannot be."""
    rows: list[list[str]] = []
    before = csv.field_size_limit(LONGEST_LINE)
    try:
        rows.extend(csv.reader((line + "\n" for line in lines), delimiter=delimiter, skipinitialspace=delimiter == " "))
    except csv.Error:
        pass
    finally:
        csv.field_size_limit(before)
    return rows


def split(line: str, delimiter: str) -> list[str]:
    """Cut one line into cells."""
    return next(iter(parse([line], delimiter)), [""]) if '"' in line else line.split(delimiter)
