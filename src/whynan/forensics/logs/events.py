"""TensorBoard event files, read without TensorBoard.

A file is a row of TFRecords: length (8 bytes), its masked CRC-32C, the data, its masked CRC-32C. The data is an `Event`
protocol buffer: wall_time = 1, step = 2, file_version = 3, summary = 5. A summary holds values: tag = 1,
simple_value = 2, tensor = 8. The file of a live run ends in the middle of a record: that is normal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import IO

from whynan.forensics.logs.entries import MOST_NAME, Entry
from whynan.forensics.logs.wire import crc32c, fields, masked, signed
from whynan.forensics.wishes import Tick

_MOST_SCALAR = 1 << 16  # bytes of a record that can hold numbers of a curve; larger ones are pictures, graphs, histograms
_LARGEST = 1 << 31
_LISTED = {1: 5, 2: 6, 14: 13, 19: 13}  # DataType float, double, bfloat16, half: the field of TensorProto that lists such values


def is_event_file(head: bytes) -> bool:
    """Say whether a file begins with an event; TFRecords of data begin with an example."""
    if len(head) < 12 or not _length_holds(head[:12]):
        return False
    (size,) = struct.unpack("<Q", head[:8])
    return b"brain.Event:" in head[12 : 12 + min(size, 256)]


def event_entries(file: IO[bytes], tick: Tick) -> Iterator[Entry | None]:
    """Yield an entry for every event that holds scalars; None for a record that is broken.

    Cost: records above 64 KB are passed over unread.
    """
    while True:
        head = file.read(12)
        if len(head) < 12:
            return
        if not _length_holds(head):
            yield None  # without a length there is no way to the next record
            return
        (size,) = struct.unpack("<Q", head[:8])
        tick(16 + min(size, _LARGEST))
        if size > _MOST_SCALAR:
            file.seek(size + 4, 1)
            continue
        data = file.read(size + 4)
        if len(data) < size + 4:
            return
        yield from _event(data[:size], data[size:])


def _length_holds(head: bytes) -> bool:
    return masked(crc32c(head[:8])) == int.from_bytes(head[8:12], "little") and int.from_bytes(head[:8], "little") < _LARGEST


def _event(data: bytes, check: bytes) -> Iterator[Entry | None]:
    try:
        entry = _parse(data)
    except (ValueError, struct.error, StopIteration):
        yield None
        return
    if entry is not None and entry.values:
        yield entry if masked(crc32c(data)) == int.from_bytes(check, "little") else None


def _parse(data: bytes) -> Entry | None:
    entry = Entry(0, step=0)
    for number, value in fields(data):
        if number == 2 and isinstance(value, int):
            entry.step = signed(value)
        elif number == 5 and isinstance(value, bytes):
            for inner, item in fields(value):
                if inner == 1 and isinstance(item, bytes):
                    _take(entry, item)
    return entry


def _take(entry: Entry, item: bytes) -> None:
    tag, number = "", None
    for field, value in fields(item):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")[:MOST_NAME]
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            (number,) = struct.unpack("<f", value)
        elif field == 8 and isinstance(value, bytes):
            number = _tensor(value)
    if tag and number is not None:
        entry.values[tag] = number


def _tensor(data: bytes) -> float | None:
    """Return the one number of a TensorProto; None for texts, pictures and tensors of several numbers."""
    kind, packed = 0, {}
    for field, value in fields(data):
        if field == 1 and isinstance(value, int):
            kind = value
        else:
            packed[field] = value
    raw = packed.get(4) or packed.get(_LISTED.get(kind, 0))
    if not isinstance(raw, bytes):
        return None
    if kind in _NARROW:
        return _NARROW[kind](int.from_bytes(raw, "little") if 4 in packed else _first_varint(raw))
    form = {1: "<f", 2: "<d"}[kind]
    return float(struct.unpack(form, raw)[0]) if len(raw) == struct.calcsize(form) else None


def _first_varint(raw: bytes) -> int:
    return next(value for _, value in fields(b"\x08" + raw) if isinstance(value, int))


def _half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])


def _bfloat(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0])


_NARROW: dict[int, Callable[[int], float]] = {19: _half, 14: _bfloat}
