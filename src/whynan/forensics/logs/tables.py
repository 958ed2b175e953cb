"""Logs made of columns: Lightning's `metrics.csv` with its empty fields, Keras' CSVLogger, anything with a header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from whynan.forensics.logs.entries import Entry, entry_of
from whynan.forensics.logs.lines import MOST_LINE, lines
from whynan.forensics.logs.names import Role, naming
from whynan.forensics.text import delimiter_of, split
from whynan.forensics.wishes import Tick

_MOST_COLUMNS = 4096


def columns_of(header: str) -> list[str]:
    """Return the names of the columns."""
    return [name.strip().strip("#").strip() for name in split(header, _delimiter(header))][:_MOST_COLUMNS]


def is_header(line: str) -> bool:
    """Say whether a first line names the columns of a log: when, and something that is trained or measured.

    >>> is_header("epoch,step,train_loss"), is_header("age,height,label")
    (True, False)
    """
    names = columns_of(line)
    when = entry_of(dict.fromkeys(names, 1))
    timed = when.step is not None or when.epoch is not None
    return len(names) > 1 and timed and any(naming(n).role is not Role.OTHER or "acc" in n.lower() for n in when.values)


def rows(file: IO[bytes], tick: Tick) -> Iterator[Entry | None]:
    """Yield an entry for every row, without its empty fields; None for a row with more fields than columns."""
    names: list[str] = []
    delimiter = ","
    for number, line in lines(file, tick, 16 * MOST_LINE):
        if not line.strip():
            continue
        if not names:
            names, delimiter = columns_of(line), _delimiter(line)
            continue
        fields = split(line, delimiter)
        if fields[0].strip().strip("#").strip() == names[0]:
            continue  # a run that went on wrote its header again
        yield entry_of({n: f.strip() or None for n, f in zip(names, fields, strict=False)}, number) if 1 < len(fields) <= len(names) else None


def _delimiter(header: str) -> str:
    return delimiter_of([header], ",\t;|")  # spaces part words in a log
