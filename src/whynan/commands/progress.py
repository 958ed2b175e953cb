"""A bar with the rate of reading, on stderr, for work that takes longer than a second."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE = 1.0  # seconds; shorter work needs no bar


class Bar:
    """Counts the bytes that were read; shows nothing where nobody looks.

    >>> with Bar(["model.pt"], wanted=False) as bar:
    ...     bar.tick(1 << 20)
    """

    def __init__(self, paths: Sequence[str], wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._paths = paths
        self._lock = threading.Lock()
        self._read = 0
        self._began = time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._shown is not None:
            self._shown[0].stop()

    def tick(self, size: int) -> None:
        """Take note of bytes read; called from any thread."""
        if not self._wanted:
            return
        with self._lock:
            self._read += size
            if self._shown is None and time.monotonic() - self._began > _PATIENCE:
                self._shown = self._start()
            if self._shown is not None:
                self._shown[0].update(self._shown[1], completed=self._read)

    def _start(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task("checking", total=_total(self._paths))


def _total(paths: Sequence[str]) -> float | None:
    """Add up the sizes of local files; None where they cannot be known before."""
    sizes = 0
    for path in paths:
        if "://" in path:
            return None
        if os.path.isfile(path):
            sizes += os.path.getsize(path)
        for folder, _, files in os.walk(path):
            sizes += sum(os.path.getsize(f) for name in files if os.path.isfile(f := os.path.join(folder, name)))
    return sizes or None
