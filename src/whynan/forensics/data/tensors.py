"""Data kept as tensors: safetensors, and `torch.save` files, opened by the readers of checkpoints: nothing in them is run."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.checkpoints.contents import Entry, Stream
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.opening import open_checkpoint
from whynan.forensics.checkpoints.sources import Cut, Deflated, Held, Repeated, Span
from whynan.forensics.data.sources import LARGEST_TURNED, Reader, Source, are_samples, as_rows, tables_of
from whynan.forensics.data.tables import Table, need

if TYPE_CHECKING:
    import numpy as np

    from whynan.forensics.data.tables import Array

_PLAIN = frozenset({"float64", "float32", "float16", "complex64", "complex128", "bool", *(f"{s}int{8 * n}" for s in ("", "u") for n in (1, 2, 4, 8))})


def read_tensors(place: Place) -> list[Table]:
    """Open a file of tensors that are rows.

    Cost: its header or pickle; then the rows, a block at a time.
    """
    need("numpy", "reading tensors")
    contents = open_checkpoint(place)
    danger = next((note for note in contents.notes if note.startswith("dangerous:")), "")
    if danger:
        raise Unreadable(danger)
    stem = place.name.rsplit(".", 1)[0]
    sparse = {e.name.removesuffix(".indices") for e in contents.entries if e.name.endswith(".indices")}
    dense = [e for e in contents.entries if e.shape and e.name.partition(".indices")[0] not in sparse]
    odd = [f"{e.name}: {why}, not looked at as rows" for e in dense if (why := _oddity(e))]
    sources = [_source(e, stem if len(dense) == 1 and e.name == "tensor" else e.name) for e in dense if not _oddity(e)]
    if not sources:
        raise Unreadable(odd[0] if odd else "no tensor in it has rows")
    listed = all(s.name.isdigit() and len(s.shape) == 1 for s in sources)
    tables = [as_rows(stem, sources)] if listed and are_samples(sources) else tables_of(sources)
    tables[0].notes.extend([*contents.notes, *odd])
    return tables


def _oddity(entry: Entry) -> str:
    """Say why the bytes of a tensor are not its rows one after the other, or nothing."""
    stream, form = entry.stream, FORMATS[entry.dtype]
    if entry.dtype not in _PLAIN and entry.dtype != "bfloat16" and (not form.table or len(form.table[0]) > 1):
        return f"is {entry.dtype}"
    held = stream.size if isinstance(stream, Span | Deflated | Cut) else len(stream.data) if isinstance(stream, Held) else None
    if isinstance(stream, Repeated) or held not in (None, math.prod(entry.shape) * form.size):
        return "shows its numbers more than once or leaves gaps between them"
    return ""


def _source(entry: Entry, name: str) -> Source:
    import numpy as np

    plain = entry.dtype in _PLAIN
    stored = np.dtype(entry.dtype if plain else f"u{FORMATS[entry.dtype].width}")
    begin = partial(_begin_apart if entry.layout and entry.layout[0] else _begin, entry, stored)
    return Source(name, stored if plain else np.dtype("f4"), entry.shape, begin, "" if plain else entry.dtype, foldable=not entry.layout)


def _begin(entry: Entry, stored: np.dtype, width: int) -> Reader:
    taken = _Taken(entry.stream)

    def read(rows: int) -> Array:
        values = _widened(taken.next(rows * width, stored), entry.dtype)
        return (_laid(values, entry.layout, (rows, *entry.shape[1:])) if entry.layout else values).reshape(rows, width)

    return read


def _begin_apart(entry: Entry, stored: np.dtype, width: int) -> Reader:
    """Rows that do not lie one after the other: all are held."""
    size = math.prod(entry.shape) * stored.itemsize
    if size > LARGEST_TURNED:
        raise Unreadable(f"{entry.name}: its rows do not lie one after the other, {size} bytes: too many to be held")
    whole = _laid(_Taken(entry.stream).next(math.prod(entry.shape), stored), entry.layout, entry.shape).reshape(-1, width)
    done = 0

    def read(rows: int) -> Array:
        nonlocal done
        done += rows
        return _widened(whole[done - rows : done], entry.dtype)

    return read


def _laid(values: Array, layout: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Bring values from their order in memory to that of the dimensions; those of length 1 are not in the layout."""
    import numpy as np

    own = sorted(range(len(layout)), key=layout.__getitem__)
    return np.asarray(values.reshape([shape[i] for i in layout]).transpose(own).reshape(shape))


def _widened(values: Array, dtype: str) -> Array:
    import numpy as np

    if dtype in _PLAIN:
        return values
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.array([number for (number,) in FORMATS[dtype].table], np.float32)[values]


class _Taken:
    """The values of a stream, so many at a time; a file is opened for each time: a table may have thousands of columns."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pieces = iter(()) if isinstance(stream, Span) else stream()
        self._rest = memoryview(b"")
        self._held = bytearray()
        self._done = 0

    def next(self, values: int, stored: np.dtype) -> Array:
        import numpy as np

        size = values * stored.itemsize
        if len(self._held) != size:
            self._held = bytearray(size)
        if isinstance(self._stream, Span):
            with self._stream.source.open() as file:
                next(self._stream.part(self._done, size).pieces(file, memoryview(self._held)), None)
        else:
            self._copy(memoryview(self._held))
        self._done += size
        return np.frombuffer(self._held, stored)

    def _copy(self, into: memoryview) -> None:
        while len(into):
            self._rest = self._rest if len(self._rest) else next(self._pieces, self._rest)
            if not len(self._rest):
                raise Unreadable("truncated: a tensor ended early")
            size = min(len(into), len(self._rest))
            into[:size] = self._rest[:size]
            into, self._rest = into[size:], self._rest[size:]
