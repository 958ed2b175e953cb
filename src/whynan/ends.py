"""What a script may have taken away: a standard stream, whose number no file of ours takes; the path our own modules are found on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_STANDARD = 3  # input, output, errors
_PATH = list(sys.path)  # before a script has changed it


def aloud(text: str) -> None:
    """Print a line on stderr; where there is none it is lost: stdout belongs to the script."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


@contextlib.contextmanager
def off_standard_streams() -> Iterator[None]:
    """Keep what is opened in this block off the numbers of the standard streams: what is said into a closed one would land in it.

    Cost: one file opened and closed.
    """
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while not held or held[-1] < _STANDARD:
                held.append(os.open(os.devnull, os.O_RDWR))
            os.close(held.pop())
        yield
    finally:
        for end in held:
            os.close(end)


@contextlib.contextmanager
def own_path() -> Iterator[None]:
    """Find modules where they were when whynan started too, whatever the script has done to `sys.path` since."""
    path = sys.path
    added = [place for place in _PATH if place not in path]
    path.extend(added)
    try:
        yield
    finally:
        for place in added:
            with contextlib.suppress(ValueError):
                path.remove(place)
