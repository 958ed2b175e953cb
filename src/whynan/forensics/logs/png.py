"""A sheet as PNG, with the standard library alone: smooth lines, and the usual 5 by 7 dot-matrix letters."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import replace

from whynan.forensics.logs.font import GLYPHS, HEIGHT, WIDTH
from whynan.forensics.logs.sheet import Box, Line, Sheet, Text

_FINE = 2  # pixels for one of the sheet, each way
_Colour = tuple[int, int, int]


def to_png(sheet: Sheet) -> bytes:
    """Write a sheet as PNG.

    Cost: about a second for a curve of 2 000 points; 3 bytes a pixel.
    """
    canvas = Canvas(_FINE * sheet.width, _FINE * sheet.height)
    for shape in sheet.shapes:
        canvas.draw(_scaled(shape))
    return canvas.encode()


def _scaled(shape: Line | Box | Text) -> Line | Box | Text:
    if isinstance(shape, Line):
        return Line(tuple((_FINE * x, _FINE * y) for x, y in shape.points), shape.colour, _FINE * shape.width)
    if isinstance(shape, Box):
        return Box(_FINE * shape.x, _FINE * shape.y, _FINE * shape.width, _FINE * shape.height, shape.colour)
    return replace(shape, x=_FINE * shape.x, y=_FINE * shape.y, size=_FINE * shape.size)


class Canvas:
    """Pixels that can be drawn on."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = bytearray(b"\xff" * (3 * width * height))

    def draw(self, shape: Line | Box | Text) -> None:
        """Draw one shape over what is there."""
        colour = _parse(shape.colour)
        if isinstance(shape, Box):
            self._box(shape, colour)
        elif isinstance(shape, Text):
            self._text(shape, colour)
        else:
            for start, end in zip(shape.points, shape.points[1:], strict=False):
                self._segment(start, end, shape.width, colour)

    def encode(self) -> bytes:
        """Return the file."""
        stride = 3 * self.width
        rows = b"".join(b"\0" + self._pixels[y * stride : (y + 1) * stride] for y in range(self.height))
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")

    def _blend(self, x: int, y: int, colour: _Colour, share: float) -> None:
        if 0 <= x < self.width and 0 <= y < self.height and share > 0.0:
            at = 3 * (y * self.width + x)
            for part in range(3):
                old = self._pixels[at + part]
                self._pixels[at + part] = round(old + (colour[part] - old) * min(1.0, share))

    def _box(self, box: Box, colour: _Colour) -> None:
        left, right = max(0, round(box.x)), min(self.width, max(round(box.x + box.width), round(box.x) + 1))
        row = bytes(colour) * max(0, right - left)
        for y in range(max(0, round(box.y)), min(self.height, round(box.y + box.height))):
            at = 3 * (y * self.width + left)
            self._pixels[at : at + len(row)] = row

    def _segment(self, start: tuple[float, float], end: tuple[float, float], width: float, colour: _Colour) -> None:
        """Walk along the longer direction and shade the pixels across it by how much of them the line covers."""
        steep = abs(end[1] - start[1]) > abs(end[0] - start[0])
        (a0, b0), (a1, b1) = sorted([(p[1], p[0]) if steep else p for p in (start, end)])
        slope = (b1 - b0) / (a1 - a0) if a1 > a0 else 0.0
        half = width / 2 * math.hypot(1.0, slope)
        for along in range(round(a0), round(a1) + 1):
            middle = b0 + slope * (min(max(along, a0), a1) - a0)
            for across in range(math.floor(middle - half), math.ceil(middle + half) + 1):
                cover = min(across + 0.5, middle + half) - max(across - 0.5, middle - half)
                self._blend(across if steep else along, along if steep else across, colour, cover)

    def _text(self, text: Text, colour: _Colour) -> None:
        scale = max(1, round(text.size / 9))
        advance = (WIDTH + 1) * scale
        length = advance * len(text.words)
        left = round(text.x - {"start": 0, "middle": length / 2, "end": length}[text.anchor])
        top = round(text.y - HEIGHT * scale)
        for place, letter in enumerate(text.words):
            self._glyph(GLYPHS.get(letter, GLYPHS["?"]), left + place * advance, top, scale, colour)

    def _glyph(self, columns: bytes, left: int, top: int, scale: int, colour: _Colour) -> None:
        for column, bits in enumerate(columns):
            for row in range(8):
                if bits >> row & 1:
                    self._box(Box(left + column * scale, top + row * scale, scale, scale, ""), colour)


def _parse(colour: str) -> _Colour:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
