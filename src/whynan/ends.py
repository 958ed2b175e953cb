"""The standard streams, where a script has closed one: what is said goes nowhere else, and no file of ours takes its number."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_STANDARD = 3  # input, output, errors


def aloud(text: str) -> None:
    """Print a line on stderr; where there is none it is lost: stdout belongs to the script."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


@contextlib.contextmanager
def apart() -> Iterator[None]:
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
