"""What every reader of data gives: tables of columns, read in blocks of rows.

Column ─┬─► Table ─► Block ─► Piece (the values of one column in one block)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from whynan.forensics.addresses import Unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

BLOCK = 1 << 21  # bytes of a block: enough to amortise a call, small enough to stay in the cache


class Sort(StrEnum):
    """What the values of a column are."""

    FLOAT = "float"
    INTEGER = "integer"
    BOOL = "bool"
    TEXT = "text"
    OTHER = "other"  # times, raw bytes: compared, never computed with


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its dtype as the file says it, and the shape of one row of it."""

    name: str
    dtype: str
    sort: Sort
    shape: tuple[int, ...] | None = ()  # None: every row has a length of its own
    classes: int = 0  # how many classes the file itself declares
    named: bool = True  # the file names it, so it is a feature of its own

    @property
    def numeric(self) -> bool:
        return self.sort in (Sort.FLOAT, Sort.INTEGER)

    @property
    def scalar(self) -> bool:
        return self.shape == ()


@dataclass(frozen=True, slots=True)
class Piece:
    """The values of one column in one block.

    Dense: `values` has one row per row, flattened to two axes. Ragged: `values` is flat and `lengths` says how many belong to
    each row. Text is ragged bytes. The memory may be used again for the next block.
    """

    values: Array
    lengths: Array | None = None
    missing: Array | None = None  # rows that have no value

    @property
    def rows(self) -> int:
        return len(self.values) if self.lengths is None else len(self.lengths)


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of every column of a table."""

    pieces: tuple[Piece, ...]
    size: int  # bytes that were read for it

    @property
    def rows(self) -> int:
        return self.pieces[0].rows if self.pieces else 0


@dataclass(slots=True)
class Trouble:
    """What could not be taken as it is: lines, items, files; how many, and the first few."""

    what: str
    message: str
    unit: str = "row"  # what `places` counts; empty where the message says it all
    bad: bool = True
    count: int = 0
    places: list[int] = field(default_factory=list)

    def add(self, place: int) -> None:
        self.count += 1
        if len(self.places) < 8:
            self.places.append(place)

    def reset(self) -> None:
        self.count = 0
        self.places.clear()


@dataclass(frozen=True, slots=True)
class Table:
    """Columns that have the same rows; `blocks` may be called again for a second look."""

    name: str
    columns: tuple[Column, ...]
    blocks: Callable[[], Iterator[Block]]
    batch: int = 0  # how many rows a batch has, where the source itself says so
    notes: list[str] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)  # filled while blocks are read
    line_of: Callable[[int], int] | None = None  # the line of a text file a row begins on
    again: bool = True  # its blocks can be read a second time, in the same order
    signature: object = None  # tables with the same one may be parts of one


def chained(name: str, tables: list[Table]) -> Table:
    """Return one table whose rows are those of several, one after the other."""

    def blocks() -> Iterator[Block]:
        for table in tables:
            yield from table.blocks()

    notes = list(dict.fromkeys(note for t in tables for note in t.notes))
    return Table(name, tables[0].columns, blocks, tables[0].batch, notes, [t for table in tables for t in table.troubles], signature=tables[0].signature)


def need(package: str, what: str, pip: str = "") -> Any:
    """Import a package that only this format needs, or say in one line that it is missing."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise Unreadable(f"{what} needs {pip or package}; pip install {pip or package}") from None


def plain_dtype(dtype: Any) -> tuple[str, Sort]:
    """Return the name and sort of a numpy dtype."""
    sorts = {"f": Sort.FLOAT, "c": Sort.FLOAT, "i": Sort.INTEGER, "u": Sort.INTEGER, "b": Sort.BOOL, "U": Sort.TEXT, "S": Sort.TEXT}
    return dtype.newbyteorder("=").name, sorts.get(dtype.kind, Sort.OTHER)
