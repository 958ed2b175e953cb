"""Lines of a report: 80 columns, nothing in them that steers the terminal."""

from __future__ import annotations

import re
import textwrap

WIDTH = 80
_GROUPED = "\u2009"  # stands between the digits of a number while its line is broken


def printable(line: str) -> str:
    r"""Make control characters visible: a name in a file must not steer the terminal.

    >>> printable("layer\x1b[31m.weight")
    'layer\\x1b[31m.weight'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


def wrap(line: str, indent: str = "  ") -> list[str]:
    """Break a line at spaces; names and numbers are never broken."""
    held = re.sub(r"(?<=\d) (?=\d{3}\b)", _GROUPED, printable(line))
    return [w.replace(_GROUPED, " ") for w in textwrap.wrap(held, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)] or [""]


def short(line: str) -> str:
    """Cut a line that is too wide."""
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def name_of(path: str) -> str:
    """Return the last part of a path or address, as it is printed."""
    return printable(path.rstrip("/").rsplit("/", 1)[-1])
