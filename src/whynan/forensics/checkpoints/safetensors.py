"""Safetensors: a JSON header with names, dtypes, shapes and offsets, then the values.

The header is read by ourselves, value by value: a hostile one costs no more memory than its own size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from json import decoder
from typing import Any

from whynan.forensics.addresses import NotLookedAt, Unreadable
from whynan.forensics.checkpoints.contents import Contents, Entry
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.known import MOST, MOST_DIMENSIONS
from whynan.forensics.checkpoints.sources import Source

LONGEST_HEADER = 64 << 20
_LONGEST_DESCRIPTION = 4096
_BLANK = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"{}]+')
_MOST_TENSORS = 500_000
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


def open_safetensors(source: Source) -> Contents:
    """Open a safetensors file; raises `Unreadable` where the header does not describe the bytes exactly."""
    text, start = _header(source)
    entries: dict[str, Entry] = {}
    values: dict[str, bool | int | float | str | None] = {}
    notes: list[str] = []
    covered: list[tuple[int, int]] = []
    for name, at in _pairs(text, _brace(text, 0)):
        if name == "__metadata__":
            values |= {f"__metadata__.{k}": v for k, v in _texts(text, at)}
            continue
        if name in entries:
            raise Unreadable(f"damaged header: {name[:100]} is there twice")
        if len(entries) >= _MOST_TENSORS:
            raise NotLookedAt(f"holds more than {_MOST_TENSORS} tensors")
        entry, span = _entry(source, start, name, _description(text, at, name))
        covered.append(span)
        if entry is None:
            notes.append(f"{name[:100]} has a dtype that is not known: not looked into")
        else:
            entries[name] = entry
    _refuse_holes(covered, source.size - start)
    return Contents("safetensors", source.size, tuple(entries.values()), values, tuple(notes))


def _header(source: Source) -> tuple[str, int]:
    if source.size < 8:
        raise Unreadable(f"cut short: {source.size} bytes")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > LONGEST_HEADER:
        raise (NotLookedAt if length <= source.size else Unreadable)(f"declares a header of {length} bytes, more than is looked at")
    if length + 8 > source.size:
        raise Unreadable(f"cut short: a header of {length} bytes is declared, the file has {source.size}")
    try:
        return source.read(8, length).decode("utf-8"), length + 8
    except UnicodeDecodeError:
        raise Unreadable("damaged header: not text") from None


def _skip(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _brace(text: str, at: int) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != "{":
        raise Unreadable("damaged header: not a JSON object")
    return at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] != '"':
        raise Unreadable("damaged header: a text is expected")
    try:
        found: tuple[str, int] = decoder.scanstring(text, at + 1, True)  # type: ignore[attr-defined]
    except ValueError:
        raise Unreadable("damaged header: a text has no end") from None
    return found


def _pairs(text: str, at: int) -> Iterator[tuple[str, int]]:
    """Yield each key of an object with where its value begins; the value must be an object or a text."""
    at = _skip(text, at)
    while text[at : at + 1] != "}":
        key, at = _string(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise Unreadable("damaged header: no value after a name")
        at = _skip(text, at + 1)
        yield key, at
        at = _skip(text, _after(text, at))
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise Unreadable("damaged header: it has no end")


def _after(text: str, at: int) -> int:
    """Where a value ends: a text, or an object without further objects in it."""
    if text[at : at + 1] == '"':
        return _string(text, at)[1]
    if text[at : at + 1] != "{":
        raise Unreadable("damaged header: neither a text nor an object")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        if text[at : at + 1] == '"':
            at = _string(text, at)[1]
        else:
            step = _PLAIN.match(text, at)
            if step is None:
                raise Unreadable("damaged header: it has no end, or is nested")
            at = step.end()
    return at + 1


def _texts(text: str, at: int) -> Iterator[tuple[str, str]]:
    for key, value_at in _pairs(text, _brace(text, at)):
        yield key[:200], _string(text, value_at)[0][:1000]


def _description(text: str, at: int, name: str) -> dict[str, Any]:
    end = _after(text, at)
    if end - at > _LONGEST_DESCRIPTION:
        raise Unreadable(f"damaged header: {name[:100]} is described in {end - at} bytes")
    try:
        found = json.loads(text[at:end])
    except (ValueError, RecursionError):
        raise Unreadable(f"damaged header: {name[:100]} is described wrongly") from None
    if not isinstance(found, dict):
        raise Unreadable(f"damaged header: {name[:100]} is described wrongly")
    return found


def _entry(source: Source, start: int, name: str, found: dict[str, Any]) -> tuple[Entry | None, tuple[int, int]]:
    shape, offsets, dtype = _naturals(found.get("shape")), _naturals(found.get("data_offsets")), found.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1] or not isinstance(dtype, str):
        raise Unreadable(f"damaged header: {name[:100]} is described wrongly")
    begin, end = offsets
    span = source.span(start + begin, end - begin)
    known = _DTYPES.get(dtype)
    if known is None:
        return None, (begin, end)
    needed = math.prod(shape) * FORMATS[known].size
    if known == "float4_e2m1fn_x2":
        needed = (needed + 1) // 2
    if needed != end - begin:
        raise Unreadable(f"{name[:100]} declares {needed} bytes and has {end - begin}")
    return Entry(name, known, shape, span), (begin, end)


def _naturals(values: object) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        return None
    return tuple(values) if all(type(v) is int and 0 <= v < MOST for v in values) else None


def _refuse_holes(covered: list[tuple[int, int]], size: int) -> None:
    """The values follow each other without overlap and without a gap, as the format demands."""
    at = 0
    for begin, end in sorted(covered):
        if begin != at:
            raise Unreadable("damaged header: two tensors overlap" if begin < at else f"damaged header: bytes {at} to {begin} belong to no tensor")
        at = end
    if at != size:
        raise Unreadable(f"{size - at} bytes at the end belong to no tensor")
