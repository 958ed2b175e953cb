"""CSV and its relatives: streamed line by line, with any usual delimiter, encoding and word for a missing cell."""

from __future__ import annotations

import bisect
import codecs
import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data.sources import text_piece
from whynan.forensics.data.tables import Block, Column, Piece, Sort, Table, Trouble, need
from whynan.forensics.text import LONGEST_LINE, delimiter_of, encoding_of, parse

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

MISSING = frozenset({"", "na", "n/a", "null", "none", "nil", "<na>", "#n/a", "?", "-", "missing"})
_HEAD = 1 << 18
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f"))
_CELLS = 1 << 17  # cells of a block
_LARGEST_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Shape:
    """How a file of delimited text is to be read."""

    encoding: str
    delimiter: str
    names: tuple[str, ...]
    header: bool
    sorts: tuple[Sort, ...]
    comma: bool  # the decimal sign is a comma


class Troubles(NamedTuple):
    """What can be wrong with the text itself."""

    ragged: Trouble
    words: Trouble
    unclosed: Trouble

    @classmethod
    def of(cls, width: int) -> Troubles:
        ragged = Trouble("ragged-line", f"lines with another number of cells than {width}", "line", bad=False)
        words = Trouble("not-a-number", "cells of number columns that are no numbers", "line", bad=False)
        return cls(ragged, words, Trouble("unclosed-quote", "a quote that is never closed takes in the rest of the file", "line"))


class Lines:
    """Which line a row begins on, when a quoted cell may hold line breaks."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._shifts: list[int] = []

    def at(self, row: int, line: int) -> None:
        if (not self._shifts or line - row != self._shifts[-1]) and len(self._rows) < 100_000:
            self._rows.append(row)
            self._shifts.append(line - row)

    def __call__(self, row: int) -> int:
        place = bisect.bisect_right(self._rows, row) - 1
        return row + self._shifts[place] if place >= 0 else 0


def read_csv(place: Place) -> list[Table]:
    """Open a CSV file."""
    need("numpy", "reading CSV")
    shape = find_shape(place)
    if not shape.names:
        raise Unreadable("no rows")
    columns = [
        Column(n, "text" if s is Sort.TEXT else "int64" if s is Sort.INTEGER else "float64", s, None if s is Sort.TEXT else ())
        for n, s in zip(shape.names, shape.sorts, strict=True)
    ]
    lines = Lines()
    notes = [] if shape.encoding in ("utf-8", "utf-8-sig") else [f"read as {shape.encoding}"]
    troubles = Troubles.of(len(columns))

    def blocks() -> Iterator[Block]:
        for trouble in troubles:
            trouble.reset()
        return _blocks(place, shape, lines, troubles)

    return [Table("", tuple(columns), blocks, 0, notes, list(troubles), lines, signature=(shape.names, shape.sorts))]


def find_shape(place: Place) -> Shape:
    """Find out how a file is written from its beginning."""
    with place.open() as file:
        head = file.read(_HEAD)
        whole = not file.read(1)
    encoding = _encoding(head)
    lines = codecs.getincrementaldecoder(encoding)("replace").decode(head).splitlines()
    if not whole and len(lines) > 1:
        lines = lines[:-1]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise Unreadable("no rows" if not head.strip() else "no text in it")
    delimiter = delimiter_of(lines[:50])
    rows = [row for row in parse(lines[:2000], delimiter) if row]
    if not rows:
        raise Unreadable("not CSV from its first line on")
    comma = delimiter == ";" and any(_comma_number(c) for row in rows[1:20] for c in row)
    header = _has_header(rows, comma)
    names = _unique(rows[0]) if header else tuple(str(i) for i in range(len(rows[0])))
    body = rows[1:] if header else rows
    sorts = tuple(_sort([r[i] for r in body if i < len(r)], comma) for i in range(len(names)))
    return Shape(encoding, delimiter, names, header, sorts, comma)


def _encoding(head: bytes) -> str:
    told = encoding_of(head)
    if told is not None:
        return told
    if len(head) - len(head.translate(None, _CONTROLS)) > 0.05 * len(head):
        raise Unreadable("binary, not text")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _has_header(rows: list[list[str]], comma: bool) -> bool:
    first = rows[0]
    if first == [str(i) for i in range(len(first))] and len(first) > 1:
        return len(rows) > 1  # a frame whose columns have numbers for names
    cells = [c.strip() for c in first]
    if any(_number(c, comma) is not None for c in cells) or all(c.lower() in MISSING for c in cells):
        return False
    return any(c.lower() not in MISSING for c in cells)


def _unique(cells: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    names: list[str] = []
    for cell in cells:
        name = cell.strip() if names else cell.strip().removeprefix("# ")  # as numpy.savetxt writes a header
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}.{seen[name] - 1}")
    return tuple(names)


def _sort(cells: list[str], comma: bool) -> Sort:
    given = [c for c in (c.strip() for c in cells) if c.lower() not in MISSING]
    numbers = [c for c in given if _number(c, comma) is not None]
    if not numbers or len(numbers) < 0.8 * len(given):
        return Sort.TEXT
    return Sort.INTEGER if all(c.lstrip("+-").isdigit() for c in numbers) else Sort.FLOAT


def _number(cell: str, comma: bool) -> float | None:
    text = cell.strip().replace(",", ".") if comma else cell
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def _comma_number(cell: str) -> bool:
    return cell.count(",") == 1 and _number(cell, True) is not None


def _blocks(place: Place, shape: Shape, lines: Lines, troubles: Troubles) -> Iterator[Block]:
    step = max(1, _CELLS // len(shape.names))
    before = csv.field_size_limit(LONGEST_LINE)
    start = seen = 0
    try:
        with place.open() as file:
            rows: list[list[str]] = []
            for row in _rows(file, shape, lines, troubles):
                rows.append(row)
                if len(rows) == step or file.tell() - seen > _LARGEST_BLOCK:
                    yield Block(_pieces(rows, shape, start, lines, troubles.words), file.tell() - seen)
                    start, seen, rows = start + len(rows), file.tell(), []
            if rows:
                yield Block(_pieces(rows, shape, start, lines, troubles.words), file.tell() - seen)
    except csv.Error as error:
        raise Unreadable(f"not CSV after row {start}: {error}") from None
    finally:
        csv.field_size_limit(before)


def _rows(file: IO[bytes], shape: Shape, lines: Lines, troubles: Troubles) -> Iterator[list[str]]:
    width, waiting, number, begins = len(shape.names), shape.header, 0, 1
    row: list[str] = []
    line, last = 1, [""]
    reader = csv.reader(_text_lines(file, shape.encoding, last), delimiter=shape.delimiter, skipinitialspace=shape.delimiter == " ")
    for row in reader:
        line, begins = begins, reader.line_num + 1
        if not row or (len(row) == 1 and width > 1 and not row[0].strip()):
            continue
        if waiting:
            waiting = False
            continue
        lines.at(number, line)
        number += 1
        if len(row) != width:
            troubles.ragged.add(line)
            row = row[:width] + [""] * (width - len(row))
        yield row
    if row and row[-1].endswith(("\n", "\r")) and last[-1].strip() != '"':  # the end of the file cut the cell off
        troubles.unclosed.add(line)


def _text_lines(file: IO[bytes], encoding: str, last: list[str]) -> Iterator[str]:
    text = io.TextIOWrapper(file, encoding, errors="replace", newline="")
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise Unreadable(f"a line of more than {LONGEST_LINE} characters")
        last[0] = line
        yield line.replace("\x00", "")
    text.detach()


def _pieces(rows: list[list[str]], shape: Shape, start: int, lines: Lines, words: Trouble) -> tuple[Piece, ...]:
    cells = zip(*rows, strict=True)
    return tuple(
        _text(column) if sort is Sort.TEXT else _numbers(column, sort, shape.comma, start, lines, words)
        for column, sort in zip(cells, shape.sorts, strict=True)
    )


def _text(cells: tuple[str, ...]) -> Piece:
    return text_piece([c.strip() for c in cells])


def _numbers(cells: tuple[str, ...], sort: Sort, comma: bool, start: int, lines: Lines, words: Trouble) -> Piece:
    import numpy as np

    if (not comma or sort is Sort.INTEGER) and "_" not in "".join(cells):  # Python would take 1_000
        with suppress(ValueError, OverflowError):
            return Piece(_array(cells, sort).reshape(-1, 1))
    values, missing = list(cells), np.zeros(len(cells), bool)
    for i, cell in enumerate(cells):
        if _number(cell, comma) is None:
            missing[i] = True
            if cell.strip().lower() not in MISSING:
                words.add(lines(start + i))
        elif comma:
            values[i] = cell.replace(",", ".")
    given = next((v for v, gone in zip(values, missing, strict=True) if not gone), "0")
    held = [given if gone else v for v, gone in zip(values, missing, strict=True)]
    try:
        array = _array(held, sort)
    except (ValueError, OverflowError):
        array = _array(held, Sort.FLOAT)
    return Piece(array.reshape(-1, 1), missing=missing if missing.any() else None)


def _array(cells: Iterable[str], sort: Sort) -> Array:
    """Whole numbers as such: as floats, ids beyond 2**53 would be rounded to their neighbours."""
    import numpy as np

    return np.array(list(map(int, cells)), np.int64) if sort is Sort.INTEGER else np.array(list(map(float, cells)), np.float64)
