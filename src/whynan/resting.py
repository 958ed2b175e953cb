"""What of Python itself is kept quiet for a while: its garbage collector, full collections that only our records would cause, warnings, output."""

from __future__ import annotations

import gc
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from threading import Thread, current_thread
from typing import Any, TextIO, cast

PER_CALL = 6  # objects that the collector counts for one recorded call


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep the cycle collector from visiting every object again and again while many are made; it is as it was afterwards."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def no_warnings() -> Iterator[None]:
    """Show no warnings of this thread. The filters stay as they are: to touch them would let every old warning of the program be shown again."""
    show, quiet = warnings.showwarning, current_thread()

    def shown(*args: Any, **kwargs: Any) -> None:
        if current_thread() is not quiet:
            show(*args, **kwargs)

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def no_output() -> Iterator[None]:
    """Drop what this thread writes to standard output; other threads write on."""
    output = next((known for known in _outputs if sys.stdout in (known, known.output)), None) or _OutputOfOthers(sys.stdout)
    output.sink = io.TextIOWrapper(io.BytesIO())
    quiet, output.quiet = output.quiet, current_thread()
    try:
        with redirect_stdout(cast("TextIO", output)):
            yield
    finally:
        output.quiet = quiet


class _OutputOfOthers:
    """Standard output for all threads but one."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.sink: TextIO | None = None
        self.quiet: Thread | None = None
        _outputs.append(self)  # for good: a `print` of another thread uses it without holding it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sink if current_thread() is self.quiet else self.output, name)


_outputs: list[_OutputOfOthers] = []


class Collections:
    """Lets a full collection pass only as often as the program itself makes for one.

    The records of a step live until it ends. A program that makes hundreds of calls outside modules has so many of them that Python takes
    them for long-lived objects and goes through everything there is, again and again: a tenth of a second each time. Those collections
    are made empty: whatever there is counts as permanent while they run. `gc.collect()` of the program's own is never one of them.
    """

    def __init__(self, calls: Callable[[], int]) -> None:
        self._calls = calls  # how many were recorded so far
        self._before = 0
        self._theirs = 0.0  # objects the program made itself since the last full collection
        self._emptied = False

    def watch(self) -> None:
        """Begin."""
        if sys.version_info < (3, 14):  # from there on the collector works in small parts
            self._before = self._calls()
            gc.callbacks.append(self._heard)

    def leave(self) -> None:
        """End; called again it does no harm."""
        if self._heard in gc.callbacks:
            gc.callbacks.remove(self._heard)

    def _heard(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != 2:
            return
        if phase == "stop":
            if self._emptied:
                gc.unfreeze()
                self._emptied = False
            return
        (young, old, oldest), (few, _, rare) = gc.get_threshold(), gc.get_count()
        calls, self._before = self._calls() - self._before, self._calls()
        round_of = (young + 1) * (old + 1)  # objects between two looks at those of middle age
        self._theirs += max(0, round_of * rare - PER_CALL * calls)
        by_itself = few > young and rare > oldest
        self._emptied = by_itself and self._theirs < round_of * (oldest + 1) and not gc.get_freeze_count()
        if self._emptied:
            gc.freeze()
        else:
            self._theirs = 0.0
