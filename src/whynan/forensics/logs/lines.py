"""The lines of a text file, streamed: any length, any encoding mistake, colours and progress bars taken apart."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import IO

from whynan.forensics.text import encoding_of
from whynan.forensics.wishes import Tick

PIECE = 1 << 18
MOST_LINE = 1 << 16  # characters of a line that are looked at: a log line is shorter, a dumped tensor is not
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def lines(file: IO[bytes], tick: Tick, most: int = MOST_LINE) -> Iterator[tuple[int, str]]:
    """Yield every line with its number, cut at `most` characters; a progress bar drawn over itself is several with one number.

    Cost: one piece of 256 KB and one line in memory.
    """
    number, rest = 1, ""
    for text in _texts(file, tick):
        parts = text.split("\n")
        parts[0] = rest + parts[0]
        rest = ""
        for part in parts[:-1]:
            yield from ((number, stroke[:most]) for stroke in strokes(part))
            number += 1
        *drawn, rest = parts[-1].split("\r")
        yield from ((number, stroke[:most]) for stroke in drawn)
        rest = rest[:most]
    if rest:
        yield number, rest


def _texts(file: IO[bytes], tick: Tick) -> Iterator[str]:
    piece = file.read(PIECE)
    decode = codecs.getincrementaldecoder(encoding_of(piece) or "utf-8")("replace").decode
    while piece:
        tick(len(piece))
        yield decode(piece).lstrip("\ufeff")
        piece = file.read(PIECE)


def strokes(line: str) -> list[str]:
    r"""Take a line apart where a progress bar was drawn over itself.

    >>> strokes(" 1/9 loss=2\r 2/9 loss=1\r")
    [' 1/9 loss=2', ' 2/9 loss=1']
    """
    return [s for s in line.split("\r") if s] if "\r" in line else [line]


def plain(line: str) -> str:
    r"""Return a line without colours.

    >>> plain("\x1b[32m 1/9\x1b[0m loss=2")
    ' 1/9 loss=2'
    """
    return _COLOUR.sub("", line) if "\x1b" in line else line
