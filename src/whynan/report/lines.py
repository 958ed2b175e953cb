"""Lines of a report: 80 columns, nothing in them that steers the terminal."""

from __future__ import annotations

import textwrap

WIDTH = 80


def printable(line: str) -> str:
    r"""Make control characters visible: a name in a file must not steer the terminal.

    >>> printable("layer\x1b[31m.weight")
    'layer\\x1b[31m.weight'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


def wrap(line: str, indent: str = "  ") -> list[str]:
    """Break a line at spaces; names are never broken."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def short(line: str) -> str:
    """Cut a line that is too wide."""
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def name_of(path: str) -> str:
    """Return the last part of a path or address."""
    return path.rstrip("/").rsplit("/", 1)[-1]
