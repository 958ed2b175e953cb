"""Offline runs of Weights & Biases: `run-….wandb`, read without wandb.

The file is a LevelDB log: a header of 7 bytes, then blocks of 32 768 bytes with chunks of checksum (4 bytes), length (2),
kind (1: full, first, middle, last). A record is a protocol buffer; its field 2 is a history: items = 1 with key = 1,
nested_key = 2, integer = 5, number = 6, value_json = 16; step = 2.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import IO

from whynan.forensics.logs.entries import Entry, entry_of
from whynan.forensics.logs.wire import fields, signed
from whynan.forensics.wishes import Tick

HEADER = b":W&B"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MOST_RECORD = 1 << 20
_HISTORY = 2


def offline_entries(file: IO[bytes], tick: Tick) -> Iterator[Entry | None]:
    """Yield an entry for every step that was logged; None for a record that is broken."""
    for record in _records(file, tick):
        try:
            yield from _histories(record)
        except (ValueError, RecursionError, struct.error):
            yield None


def _records(file: IO[bytes], tick: Tick) -> Iterator[bytes]:
    held = b""
    block = file.read(_BLOCK)
    at = 7
    while block:
        tick(len(block))
        while at + 7 <= len(block):
            _, size, kind = struct.unpack("<IHB", block[at : at + 7])
            if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                break
            data = block[at + 7 : at + 7 + size]
            at += 7 + size
            held = data if kind in (_FULL, _FIRST) else (held + data)[:_MOST_RECORD]
            if kind in (_FULL, _LAST) and len(data) == size:
                yield held
        block, at = file.read(_BLOCK), 0


def _histories(record: bytes) -> Iterator[Entry]:
    for number, value in fields(record):
        if number == _HISTORY and isinstance(value, bytes):
            pairs = dict(_items(value))
            entry = entry_of({k: v for k, v in pairs.items() if k not in ("_runtime", "_timestamp", "_step", "_wandb")})
            step = pairs.get("_step")
            if entry.step is None and isinstance(step, int):
                entry.step = step
            yield entry


def _items(history: bytes) -> Iterator[tuple[str, object]]:
    for number, value in fields(history):
        if number == 1 and isinstance(value, bytes):
            yield from _item(value)
        elif number == 2 and isinstance(value, bytes):
            yield from (("_step", signed(step)) for field, step in fields(value) if field == 1 and isinstance(step, int))


def _item(data: bytes) -> Iterator[tuple[str, object]]:
    names: list[str] = []
    held: object = None
    for number, value in fields(data):
        if isinstance(value, int):
            held = signed(value) if number == 5 else held
        elif number in (1, 2):
            names.append(value.decode("utf-8", "replace"))
        elif number == 6:
            (held,) = struct.unpack("<d", value)
        elif number == 16:
            held = json.loads(value)
    if names:
        yield "/".join(names), held
