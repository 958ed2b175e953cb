"""The source around spans, taken while it is still the source that ran."""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from whynan.records import Excerpt, Span

AROUND = 3  # lines before and after a span
_WIDEST = 400  # characters of a line; generated code has longer ones


def excerpts(spans: Iterable[Span]) -> tuple[Excerpt, ...]:
    """Return the lines around spans, neighbours in one piece; nothing for a file that cannot be read as it ran."""
    wanted: dict[str, set[int]] = {}
    for span in spans:
        if span.known and _line(span.file, span.line).strip() == span.code:
            last = min(max(span.end_line, span.line), span.line + 12)
            wanted.setdefault(span.file, set()).update(range(max(span.line - AROUND, 1), last + AROUND + 1))
    return tuple(piece for file, lines in wanted.items() for piece in _pieces(file, sorted(lines)))


def _pieces(file: str, numbers: list[int]) -> list[Excerpt]:
    there = len(linecache.getlines(file))
    found: list[Excerpt] = []
    for number in (n for n in numbers if n <= there):
        text = _line(file, number).rstrip("\r\n")[:_WIDEST]
        last = found[-1] if found else None
        if last is not None and last.first + len(last.lines) == number:
            found[-1] = Excerpt(file, last.first, (*last.lines, text))
        else:
            found.append(Excerpt(file, number, (text,)))
    return found


def _line(file: str, number: int) -> str:
    return linecache.getline(file, number)
