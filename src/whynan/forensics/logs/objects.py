"""Logs made of JSON: one object a line, a list of objects, or the `log_history` of a Trainer's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from whynan.forensics.addresses import Unreadable
from whynan.forensics.logs.entries import Entry, entry_of
from whynan.forensics.logs.lines import PIECE, lines
from whynan.forensics.wishes import Tick

_MOST_OBJECT = 1 << 20
_HISTORY = '"log_history"'


def object_lines(file: IO[bytes], tick: Tick) -> Iterator[Entry | None]:
    """Yield an entry for every JSON line; None for a line that is broken."""
    for number, line in lines(file, tick, _MOST_OBJECT):
        if line.strip():
            yield _decode(line, number)


def _decode(line: str, number: int) -> Entry | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry_of(found, number) if isinstance(found, dict) else None


def listed_objects(file: IO[bytes], tick: Tick) -> Iterator[Entry | None]:
    """Yield an entry for every object of a JSON list: the `log_history` of a file that has one, else the first list.

    A file that ends too early gives what is in it.

    Cost: an object and 256 KB in memory, however long the list is.
    """
    window = _Window(file, tick)
    if window.text.lstrip("\ufeff \t\r\n").startswith("{"):
        window.skip_past(_HISTORY)
    window.skip_past("[")
    decoder = json.JSONDecoder()
    while window.at_item():
        try:
            found, end = decoder.raw_decode(window.text, window.start)
        except (ValueError, RecursionError):
            if window.more():
                continue
            yield None
            return
        yield entry_of(found, window.line) if isinstance(found, dict) else None
        window.go_to(end)


class _Window:
    """The part of a file that is being decoded, and the line it begins on."""

    def __init__(self, file: IO[bytes], tick: Tick) -> None:
        self._file, self._tick = file, tick
        self.text, self.start, self.line = "", 0, 1
        self.more()

    def more(self) -> bool:
        """Read on; false at the end of the file and for an object that is too large to be a log's."""
        if len(self.text) - self.start > _MOST_OBJECT:
            return False
        piece = self._file.read(PIECE)
        self._tick(len(piece))
        self.text = self.text[self.start :] + piece.decode("utf-8", "replace")
        self.start = 0
        return bool(piece)

    def go_to(self, position: int) -> None:
        self.line += self.text.count("\n", self.start, position)
        self.start = position

    def skip_past(self, mark: str) -> None:
        found = self.text.find(mark, self.start)
        while found < 0:
            self.go_to(max(self.start, len(self.text) - len(mark)))
            if not self.more():
                raise Unreadable(f"no {mark} in it")
            found = self.text.find(mark, self.start)
        self.go_to(found + len(mark))

    def at_item(self) -> bool:
        """Go to the next item; false at the end of the list."""
        while True:
            rest = self.text[self.start : self.start + 4096]
            blank = len(rest) - len(rest.lstrip(" \t\r\n,"))
            self.go_to(self.start + blank)
            if self.start < len(self.text):
                return self.text[self.start] != "]"
            if not self.more():
                return False
