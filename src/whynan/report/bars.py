"""Speak above the progress bars of the program: tqdm's and rich's, where the program itself has imported them."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from typing import Any


@contextmanager
def above_bars() -> Iterator[None]:
    """Let what is written to stderr in this block appear above the bars, and have these drawn again below it."""
    live = _live_display()
    with _above_tqdm() if live is None else _above_rich(live):
        yield


def _above_tqdm() -> AbstractContextManager[Any]:
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    mode: Any = getattr(tqdm, "external_write_mode", None)
    usable = mode is not None and getattr(tqdm, "_instances", None) and not getattr(sys.stderr, "closed", True)
    return mode(file=sys.stderr) if usable else nullcontext()


def _live_display() -> Any:
    """Return the live display of rich that is on the terminal which stderr goes to."""
    kind = getattr(sys.modules.get("rich.live"), "Live", None)
    if kind is None or getattr(sys.stderr, "closed", True) or not sys.stderr.isatty():
        return None
    shown = [item for item in gc.get_objects() if issubclass(type(item), kind) and item.is_started and item.console.is_terminal]
    return shown[0] if shown else None


@contextmanager
def _above_rich(live: Any) -> Iterator[None]:
    """A live display knows only what goes through its own console."""
    from rich.text import Text

    held = _Held()
    try:
        with redirect_stderr(held):
            yield
    finally:
        if held.getvalue():
            live.console.print(Text.from_ansi(held.getvalue().removesuffix("\n")), soft_wrap=True, highlight=False)


class _Held(io.StringIO):
    """Text on its way to a terminal: colours are kept."""

    def isatty(self) -> bool:
        """As the terminal would answer."""
        return True
