"""The table of contents of a zip archive, read by ourselves: offsets that can be checked, entries that are never unpacked to disk."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

from whynan.forensics.addresses import NotLookedAt, Unreadable
from whynan.forensics.checkpoints.sources import Deflated, Source, Span

_LONGEST_TABLE = 64 << 20
_MOST_ENTRIES = 500_000
_MOST_RATIO = 1100  # deflate cannot do better than 1032
_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02", b"PK\x03\x04"
_DAMAGED = "a damaged zip archive: its table of contents cannot be read"


@dataclass(frozen=True, slots=True)
class Packed:
    """One entry of an archive."""

    header: int  # where its local header begins
    packed: int  # bytes in the archive
    size: int  # bytes that come out
    method: int


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive whose table of contents was read."""

    source: Source
    entries: dict[str, Packed]
    file: IO[bytes] | None = None  # open while entries are looked up

    @classmethod
    def of(cls, source: Source, file: IO[bytes] | None = None) -> Archive:
        """Read the table of contents; raises `Unreadable`."""
        start, size, count = _find_table(source)
        if size > _LONGEST_TABLE or count > _MOST_ENTRIES:
            raise NotLookedAt(f"a zip archive that declares {count} entries")
        try:
            entries = _read_table(source.read(start, size), count)
        except (struct.error, UnicodeError):
            raise Unreadable(_DAMAGED) from None
        _refuse_overlaps(entries, start)
        return cls(source, entries, file)

    def content(self, name: str) -> Span | Deflated:
        """The bytes of an entry; raises `Unreadable`."""
        entry = self.entries.get(name)
        if entry is None:
            raise Unreadable(f"{name[:100]} is missing from the archive")
        head = self.source.read(entry.header, 30, self.file)
        if head[:4] != _LOCAL:
            raise Unreadable(f"a damaged zip archive: no entry where {name[:100]} should be")
        names, extras = struct.unpack("<HH", head[26:30])
        span = self.source.span(entry.header + 30 + names + extras, entry.packed)
        if entry.method == 0:
            if entry.packed != entry.size:
                raise Unreadable(f"a damaged zip archive: {name[:100]} has two sizes")
            return span
        if entry.method != 8:
            raise NotLookedAt(f"{name[:100]} is compressed in a way that is not known")
        if entry.size > entry.packed * _MOST_RATIO:
            raise NotLookedAt(f"{name[:100]} declares {entry.size} bytes out of {entry.packed}: a zip bomb")
        return Deflated(span, entry.size)

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a small entry."""
        content = self.content(name)
        if content.size > limit:
            raise NotLookedAt(f"{name[:100]} declares {content.size} bytes, more than is looked at")
        return b"".join(bytes(piece) for piece in content())


def _find_table(source: Source) -> tuple[int, int, int]:
    """Where the table begins, its length, and how many entries it has."""
    tail_size = min(source.size, (1 << 16) + 42)
    tail = source.read(source.size - tail_size, tail_size)
    at = tail.rfind(_END)
    if at < 0 or at + 22 > len(tail):
        raise Unreadable("cut short: a zip archive without its table of contents")
    count, size, start = struct.unpack("<HII", tail[at + 10 : at + 20])
    locator = tail[at - 20 : at] if at >= 20 else b""
    if locator[:4] == _LOCATOR:
        record = source.read(struct.unpack("<Q", locator[8:16])[0], 56)
        if record[:4] != _END64:
            raise Unreadable(_DAMAGED)
        count, size, start = struct.unpack("<QQQ", record[32:56])
    return start, size, count


def _read_table(table: bytes, count: int) -> dict[str, Packed]:
    entries: dict[str, Packed] = {}
    at = 0
    for _ in range(count):
        if table[at : at + 4] != _ENTRY:
            raise Unreadable(_DAMAGED)
        method, packed, size, names, extras, notes, header = struct.unpack("<10xH8xIIHHH8xI", table[at : at + 46])
        name = table[at + 46 : at + 46 + names].decode("utf-8")
        extra = table[at + 46 + names : at + 46 + names + extras]
        size, packed, header = _wide(extra, [size, packed, header])
        if name in entries:
            raise Unreadable(f"a damaged zip archive: {name[:100]} is there twice")
        entries[name] = Packed(header, packed, size, method)
        at += 46 + names + extras + notes
    return entries


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Put in the 64-bit numbers that the table has no room for."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            field = extra[at + 4 : at + 4 + size]
            for i, number in enumerate(numbers):
                if number == 0xFFFFFFFF:
                    numbers[i], field = struct.unpack("<Q", field[:8])[0], field[8:]
        at += 4 + size
    return numbers


def _refuse_overlaps(entries: dict[str, Packed], end: int) -> None:
    """Two entries over the same bytes are how a small file becomes an endless one."""
    order = [(e.header, e.header + 30 + e.packed) for e in sorted(entries.values(), key=lambda e: e.header)]
    if any(stop > start for (_, stop), (start, _) in pairwise([*order, (end, end)])):
        raise Unreadable("a damaged zip archive: its entries overlap")
