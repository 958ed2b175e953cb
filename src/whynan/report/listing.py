"""The source of a diagnosis as rows: lines with the marked stretch, and under it the carets with their label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from whynan.records import Excerpt, Incident, Span

_WIDTH = 62  # columns within which a label may stand behind its carets


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a listing: a line of source in three parts, or what is said under it."""

    kind: str  # file | source | gap | primary | secondary
    number: int = 0
    before: str = ""
    marked: str = ""
    after: str = ""
    label: str = ""


def listing(incident: Incident) -> list[Row]:
    """Return the source around the origin and the places it came from, both spans marked."""
    origin = incident.origin
    if not origin.span.known:
        return []
    marks = [replace(origin.span, label=incident.cause.label), *(s for s in origin.from_ if s.known)]
    pieces = list(incident.source) or [_guess(s) for s in marks if s.code]
    files = list(dict.fromkeys([origin.span.file, *(p.file for p in pieces)]))
    rows: list[Row] = []
    for file in files:
        own = sorted((p for p in pieces if p.file == file), key=lambda p: p.first)
        there = [s for s in marks if s.file == file]
        if own and (len(files) > 1 or rows):
            rows.append(Row("file", label=f"{file}:{there[0].line}" if there else file))
        rows += _of_file(own, there, origin.span)
    return rows


def _guess(span: Span) -> Excerpt:
    """The one line an incident without an excerpt has, indented as far as is known."""
    indent = span.indent if span.indent >= 0 else min(span.column, 4)
    return Excerpt(span.file, span.line, (" " * indent + span.code,))


def _of_file(pieces: list[Excerpt], marks: list[Span], primary: Span) -> Iterator[Row]:
    done: set[int] = set()
    for piece in pieces:
        if done and piece.first > max(done) + 1:
            yield Row("gap")
        for number, text in enumerate(piece.lines, piece.first):
            if number not in done:
                done.add(number)
                yield from _line(number, text, marks, primary)


def _line(number: int, text: str, marks: list[Span], primary: Span) -> Iterator[Row]:
    here = [s for s in marks if s.line <= number <= max(s.end_line, s.line)]
    shown = next((s for s in here if _same(s, primary)), here[0] if here else None)
    if shown is None:
        yield Row("source", number, text)
        return
    start, end = _columns(shown, number, text)
    kind = "primary" if _same(shown, primary) else "secondary"
    yield Row("source", number, text[:start], text[start:end], text[end:], kind)
    for span in sorted(here, key=lambda s: not _same(s, primary)):
        if number == max(span.end_line, span.line):
            yield _carets(span, number, text, "primary" if _same(span, primary) else "secondary")


def _same(span: Span, primary: Span) -> bool:
    return (span.line, span.column, span.end_column) == (primary.line, primary.column, primary.end_column)


def _columns(span: Span, number: int, text: str) -> tuple[int, int]:
    body = len(text) - len(text.lstrip())
    start = span.column if number == span.line else body
    end = span.end_column if number == span.end_line and span.end_column else len(text)
    start = min(max(start, body), len(text))
    return (start, min(end, len(text))) if end > start else (body, len(text))


def _carets(span: Span, number: int, text: str, kind: str) -> Row:
    start, end = _columns(span, number, text)
    lead = "".join("\t" if c == "\t" else " " for c in text[:start])
    marks = ("^" if kind == "primary" else "-") * max(end - start, 1)
    label = span.label or ("" if kind == "primary" else "came from here")
    beside = len(lead) + len(marks) + len(label) < _WIDTH
    return Row(kind, 0, lead, marks, label if beside else "", "" if beside else label)
