"""Arrays that are read from their first row to their last, a few rows at a time, whatever they lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Protocol

from whynan.forensics.addresses import Unreadable, fill
from whynan.forensics.data.tables import BLOCK, Block, Column, Piece, Sort, Table, plain_dtype

if TYPE_CHECKING:
    import numpy as np

    from whynan.forensics.data.tables import Array

LARGEST_TURNED = 1 << 28  # an array whose rows lie apart must be held whole where it cannot be mapped
_LONGEST_ROW = 1 << 26
_SAMPLES = 32  # arrays that are rows, taken at a time


class Reader(Protocol):
    """Gives the next rows of an array, flattened to two axes; the memory may be used again by the next call."""

    def __call__(self, rows: int) -> Array: ...


@dataclass(frozen=True, slots=True)
class Source:
    """One array: what it is, and how to begin reading it."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: Callable[[int], Reader]  # given how many values a row has
    shown: str = ""  # the dtype's name, where numpy has none for it
    foldable: bool = True  # leading axes can be taken together

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_size(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def kind(self) -> object:
        """What two shards of one array have in common."""
        return self.dtype, self.shown, self.shape[1:]


def with_rows(source: Source) -> tuple[Source, str]:
    """Take leading axes together until one row fits into memory; says so."""
    shape = source.shape
    while len(shape) > 1 and math.prod(shape[1:]) * source.dtype.itemsize > _LONGEST_ROW:
        shape = (shape[0] * shape[1], *shape[2:])
    if math.prod(shape[1:]) * source.dtype.itemsize > _LONGEST_ROW:
        raise Unreadable(f"{source.name}: one value has {source.dtype.itemsize} bytes: too long to be held")
    if shape == source.shape:
        return source, ""
    if not source.foldable:
        raise Unreadable(f"{source.name}: rows of {source.row_size} bytes, not stored one after the other: too long to be held")
    return replace(source, shape=shape), f"{source.name}: rows too long to be held; taken as {list(shape)}"


def tables_of(sources: list[Source]) -> list[Table]:
    """Return one table for all arrays with the same number of rows."""
    fitted = [with_rows(s) for s in sources]
    groups: dict[int, list[Source]] = {}
    for source, _ in fitted:
        groups.setdefault(source.rows, []).append(source)
    several = len(groups) > 1
    tables = [_table("" if not several else ", ".join(s.name for s in g), g) for g in groups.values()]
    tables[0].notes.extend(note for _, note in fitted if note)
    return tables


def _table(name: str, sources: list[Source]) -> Table:
    columns = [c for s in sources for c in _columns(s)]
    return Table(name, tuple(columns), lambda: _blocks(sources))


def _columns(source: Source) -> list[Column]:
    if source.dtype.names:
        return [_column(f"{source.name}.{n}" if source.name else n, *_field(source, n), True) for n in source.dtype.names]
    return [_column(source.name, source.dtype, source.shape[1:], source.shown, False)]


def _field(source: Source, name: str) -> tuple[np.dtype, tuple[int, ...], str]:
    assert source.dtype.fields is not None
    field = source.dtype.fields[name][0]
    return field.base, (*source.shape[1:], *field.shape), ""


def _column(name: str, dtype: np.dtype, shape: tuple[int, ...], shown: str, named: bool) -> Column:
    plain, sort = plain_dtype(dtype)
    return Column(name, shown or plain, sort, shape if sort is not Sort.TEXT else None, named=named)


def _blocks(sources: list[Source]) -> Iterator[Block]:
    readers = [s.begin(s.width) for s in sources]
    total, size = sources[0].rows, sum(s.row_size for s in sources)
    step = max(1, BLOCK // max(size, 1))
    for start in range(0, total, step):
        rows = min(step, total - start)
        pieces = [p for s, read in zip(sources, readers, strict=True) for p in _pieces(s, read(rows))]
        yield Block(tuple(pieces), rows * size)


def _pieces(source: Source, values: Array) -> Iterator[Piece]:
    for name in source.dtype.names or (None,):
        yield _piece(values if name is None else values[name].reshape(len(values), -1))


def _piece(values: Array) -> Piece:
    """Bring what numpy can hold into what is looked at: native order, complex as pairs, times as numbers, strings as bytes."""
    import numpy as np

    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    kind = values.dtype.kind
    if values.dtype == np.float16:
        return Piece(values.astype(np.float32))  # numpy compares half floats one by one
    if kind == "c":
        return Piece(np.ascontiguousarray(values).view(f"f{values.dtype.itemsize // 2}"))
    if kind in "mM":
        missing = np.asarray(np.isnat(values).all(axis=1))
        return Piece(values.view(np.int64), missing=missing if missing.any() else None)
    if kind in "US":
        return text_piece(_strings(values))
    return Piece(values.view(np.uint8) if kind in "bV" else values)


def _strings(values: Array) -> list[str]:
    try:
        return ["\n".join(map(_plain, row)) for row in values]
    except (SystemError, ValueError):
        raise Unreadable("damaged: holds characters that do not exist") from None


def _plain(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def text_piece(cells: list[str], missing: Array | None = None) -> Piece:
    """Return text as ragged bytes."""
    import numpy as np

    coded = [c.encode("utf-8", "surrogatepass") for c in cells]
    lengths = np.fromiter(map(len, coded), np.int64, len(coded))
    return Piece(np.frombuffer(b"".join(coded), np.uint8), lengths, missing)


def from_file(open_file: Callable[[], IO[bytes]], offset: int, dtype: np.dtype) -> Callable[[int], Reader]:
    """Return a reader of consecutive bytes. Cost: one copy into a buffer that stays in the cache."""

    def begin(width: int) -> Reader:
        file = open_file()
        held, place = bytearray(), offset

        def read(rows: int) -> Array:
            import numpy as np

            nonlocal held, place
            size = rows * width * dtype.itemsize
            if len(held) != size:
                held = bytearray(size)
            if file.tell() != place:  # some file systems hand out one object for every opening
                file.seek(place)
            fill(file, memoryview(held))
            place += size
            return np.frombuffer(held, dtype).reshape(rows, width)

        return read

    return begin


def joined(name: str, parts: list[Source]) -> Source:
    """Return one array whose rows are those of several, one after the other."""

    def begin(width: int) -> Reader:
        import numpy as np

        waiting = list(parts)
        current, left = waiting[0].begin(width), waiting[0].rows

        def read(rows: int) -> Array:
            nonlocal current, left
            taken: list[Array] = []
            while rows:
                while not left:
                    waiting.pop(0)
                    current, left = waiting[0].begin(width), waiting[0].rows
                step = min(rows, left)
                taken.append(current(step) if step == rows and not taken else current(step).copy())
                left, rows = left - step, rows - step
            return taken[0] if len(taken) == 1 else np.concatenate(taken)

        return read

    return replace(parts[0], name=name, shape=(sum(p.rows for p in parts), *parts[0].shape[1:]), begin=begin)


def as_rows(name: str, sources: list[Source]) -> Table:
    """Return a table in which every array is one row: samples of different lengths, one file or tensor each."""
    plain, sort = plain_dtype(sources[0].dtype)

    def blocks() -> Iterator[Block]:
        import numpy as np

        for start in range(0, len(sources), _SAMPLES):
            rows = [_piece(s.begin(s.width)(s.rows)).values.reshape(-1).copy() for s in sources[start : start + _SAMPLES]]
            values = np.concatenate(rows)
            yield Block((Piece(values, np.array([len(r) for r in rows], np.int64)),), values.nbytes)

    return Table(name, (Column(name, sources[0].shown or plain, sort, None, named=False),), blocks)


def are_samples(sources: list[Source]) -> bool:
    """Say whether arrays look like samples of one kind that differ in length."""
    kinds = {(s.dtype, s.shown, len(s.shape)) for s in sources}
    longest = max((s.row_size * s.rows for s in sources), default=0)
    return len(sources) > 2 and len(kinds) == 1 and len({s.shape for s in sources}) > 1 and longest <= _LONGEST_ROW and sources[0].dtype.kind in "fiu"
