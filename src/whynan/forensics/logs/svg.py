"""A sheet as SVG."""

from __future__ import annotations

from html import escape

from whynan.forensics.logs.sheet import Box, Line, Sheet, Text


def to_svg(sheet: Sheet) -> bytes:
    """Write a sheet as SVG, with nothing in it that has to be loaded.

    >>> to_svg(Sheet(9, 9, (Text(1, 8, "a<b", 7, "#000000"),))).decode().splitlines()[2]
    '<text x="1.0" y="8.0" font-size="7" fill="#000000" text-anchor="start">a&lt;b</text>'
    """
    size = f'width="{sheet.width}" height="{sheet.height}" viewBox="0 0 {sheet.width} {sheet.height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
    back = f'<rect width="{sheet.width}" height="{sheet.height}" fill="#ffffff"/>'
    return "\n".join([head, back, *map(_element, sheet.shapes), "</svg>\n"]).encode()


def _element(shape: Line | Box | Text) -> str:
    if isinstance(shape, Box):
        return f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" fill="{shape.colour}"/>'
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width}" stroke-linejoin="round"/>'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" fill="{shape.colour}" text-anchor="{shape.anchor}"'
    return f"<text {place}>{escape(_printable(shape.words), quote=False)}</text>"


def _printable(words: str) -> str:
    """Leave out what XML does not allow."""
    return "".join(c for c in words if c.isprintable())
