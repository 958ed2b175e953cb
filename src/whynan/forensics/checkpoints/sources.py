"""Where bytes lie: a file, a part of one, or memory; read in pieces, always checked against what is really there.

    Source ─► Span ─┬─► Deflated    an entry that was compressed
                    ├─► Swapped     written by a big-endian machine
                    ├─► Cut, Picked a part of a storage; a view with gaps
                    └─► Chain       several, one after the other
    Held                            bytes that are in memory already

All of them are `Stream`s. The memory of a piece is used again for the next one.
"""

from __future__ import annotations

import itertools
import os
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal

from whynan.forensics.addresses import NotLookedAt, Place, Unreadable, fill
from whynan.forensics.checkpoints.contents import Stream

PIECE = 1 << 20  # stays in the second-level cache between reading and counting
UNSIGNED: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}  # the code of an unsigned number of so many bytes


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A file, or a part of one that is a file in itself (a shard of a distributed checkpoint)."""

    place: Place
    size: int
    base: int = 0
    stamp: tuple[int, ...] = ()

    @classmethod
    def of(cls, place: Place) -> Source:
        """Look at a file without reading it."""
        with place.open() as file:
            return cls(place, place.size(), 0, _stamp(file))

    def part(self, start: int, size: int) -> Source:
        """A part as a source of its own; raises `Unreadable` where it reaches beyond the end."""
        self.span(start, size)
        return Source(self.place, size, self.base + start, self.stamp)

    def span(self, start: int, size: int) -> Span:
        """A stretch of it; raises `Unreadable` where it reaches beyond the end."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Unreadable(f"cut short: {start + size} bytes are declared, {self.size} are there")
        return Span(self, start, size)

    def read(self, start: int, size: int, file: IO[bytes] | None = None) -> bytes:
        """Read a stretch that is known to be small, from the file if it is open already."""
        self.span(start, size)
        if file is None:
            with self.open() as opened:
                return self.read(start, size, opened)
        file.seek(self.base + start)
        data = file.read(size)
        if len(data) != size:
            raise NotLookedAt("ended early: it may still be being written")
        return data

    def open(self) -> IO[bytes]:
        """Open the file; raises `Unreadable` where it is no longer the one that was looked at."""
        file = self.place.open()
        if _stamp(file) != self.stamp:
            file.close()
            raise NotLookedAt("changed while it was read")
        return file


def _stamp(file: IO[bytes]) -> tuple[int, ...]:
    """What changes when a local file does; nothing is known of others."""
    try:
        seen = os.fstat(file.fileno())
    except (OSError, AttributeError, NotImplementedError, ValueError):
        return ()
    return (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a file; two of them are equal where they are the same bytes."""

    source: Source
    start: int
    size: int

    def part(self, start: int, size: int) -> Span:
        """A stretch of this one; raises `Unreadable` where it reaches beyond the end."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Unreadable(f"a tensor reaches beyond its storage: {start + size} bytes of {self.size}")
        return Span(self.source, self.source.span(self.start + start, size).start, size)

    def __call__(self) -> Iterator[memoryview]:
        with self.source.open() as file:
            yield from self.pieces(file, memoryview(bytearray(min(self.size, PIECE))))

    def pieces(self, file: IO[bytes], buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes through a buffer of the caller."""
        file.seek(self.source.base + self.start)
        left = self.size
        while left:
            piece = buffer[: min(left, len(buffer))]
            fill(file, piece)
            yield piece
            left -= len(piece)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Bytes in memory."""

    data: bytes | bytearray | memoryview

    def __call__(self) -> Iterator[memoryview]:
        if len(self.data):
            yield memoryview(self.data)


@dataclass(frozen=True, slots=True)
class Deflated:
    """A compressed entry of an archive; never more comes out than was declared."""

    packed: Span
    size: int

    def __call__(self) -> Iterator[memoryview]:
        inflate = zlib.decompressobj(-15)
        left = self.size
        try:
            for data in itertools.chain((bytes(piece) for piece in self.packed()), (b"",)):  # at the end, what is still held back
                while left and (out := inflate.decompress(data, min(left, PIECE))):
                    data = inflate.unconsumed_tail
                    left -= len(out)
                    yield memoryview(out)
        except zlib.error:
            raise Unreadable("a compressed entry is damaged") from None
        if left:
            raise Unreadable("a compressed entry holds less than it declares")


Bytes = Span | Held | Deflated


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of a stream that can only be read from its beginning."""

    inner: Bytes
    start: int
    size: int

    def __call__(self) -> Iterator[memoryview]:
        skip, left = self.start, self.size
        for piece in self.inner():
            wanted = piece[skip : skip + left]
            skip = max(0, skip - len(piece))
            left -= len(wanted)
            if len(wanted):
                yield wanted
            if not left:
                return
        if left:
            raise Unreadable("a tensor reaches beyond its storage")


@dataclass(frozen=True, slots=True)
class Picked:
    """The numbers of a view with gaps: `outer` and `inner` hold (size, stride) in numbers; a block of the inner ones is read at once."""

    inside: Span
    width: int
    start: int
    outer: tuple[tuple[int, int], ...]
    inner: tuple[tuple[int, int], ...]

    def __call__(self) -> Iterator[memoryview]:
        reach = (sum((n - 1) * s for n, s in self.inner) + 1) * self.width
        buffer = memoryview(bytearray(reach))
        with self.inside.source.open() as file:
            for start in offsets(self.outer):
                block = self.inside.part((self.start + start) * self.width, reach)
                yield from self._pick(next(block.pieces(file, buffer)))

    def _pick(self, block: memoryview) -> Iterator[memoryview]:
        loops, (size, stride) = split_longest(self.inner)
        numbers = block.cast(UNSIGNED[self.width])
        for start in offsets(loops):
            yield memoryview(numbers[start : start + (size - 1) * stride + 1 : stride].tobytes())


def split_longest(dims: tuple[tuple[int, int], ...]) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
    """Take the longest dimension out: it is walked by slicing, the others by looping."""
    at = max(range(len(dims)), key=lambda i: dims[i][0])
    return dims[:at] + dims[at + 1 :], dims[at]


def offsets(dims: tuple[tuple[int, int], ...]) -> Iterator[int]:
    """Yield where each row of a strided view begins."""
    for index in itertools.product(*(range(n) for n, _ in dims)):
        yield sum(i * s for i, (_, s) in zip(index, dims, strict=True))


@dataclass(frozen=True, slots=True)
class Chain:
    """The parts of one tensor that lies in several places."""

    parts: tuple[Stream, ...]

    def __call__(self) -> Iterator[memoryview]:
        for part in self.parts:
            yield from part()


@dataclass(frozen=True, slots=True)
class Repeated:
    """A view that shows the same numbers several times (`expand`): yielded once, counted `times`."""

    inner: Stream
    times: int

    def __call__(self) -> Iterator[memoryview]:
        return self.inner()


@dataclass(frozen=True, slots=True)
class Swapped:
    """Numbers with their bytes in the other order."""

    inner: Stream
    width: int

    def __call__(self) -> Iterator[memoryview]:
        for piece in whole(self.inner(), self.width):
            turned = array(UNSIGNED[self.width], bytes(piece))
            turned.byteswap()
            yield memoryview(turned).cast("B")


def swapped(stream: Stream, width: int) -> Stream:
    """The same numbers with their bytes turned round."""
    if width == 1:
        return stream
    return Repeated(Swapped(stream.inner, width), stream.times) if isinstance(stream, Repeated) else Swapped(stream, width)


def cost(stream: Stream) -> int:
    """How many bytes must be read or unpacked for a stream."""
    match stream:
        case Span(size=size) | Deflated(size=size):
            return size
        case Cut(inner=inner):
            return cost(inner)
        case Picked(inside=inner) | Swapped(inner=inner) | Repeated(inner=inner):
            return cost(inner)
        case Chain(parts=parts):
            return sum(cost(part) for part in parts)
    return 0


def whole(pieces: Iterator[memoryview], width: int) -> Iterator[memoryview]:
    """Yield pieces that hold whole numbers only; a rest that is none at the end is an error."""
    rest = b""
    for piece in pieces:
        if rest or len(piece) % width:
            piece = memoryview(rest + bytes(piece))
            rest = bytes(piece[len(piece) - len(piece) % width :])
            piece = piece[: len(piece) - len(rest)]
        if len(piece):
            yield piece
    if rest:
        raise Unreadable(f"{len(rest)} bytes are left over at the end of a tensor")
