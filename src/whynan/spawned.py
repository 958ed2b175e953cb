"""Processes that a script under `whynan run` starts by itself: `mp.spawn`, `mp.Process`. Each is watched like the script.

Does not import torch: a process that simulates or reads files must not pay for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whynan.engine.guard import Guard
    from whynan.engine.options import Options

STOPPED = 3  # the exit status of a process that whynan stopped
_SPAWN = "torch.multiprocessing.spawn"
_LEFT_ALONE = ("torch.", "multiprocessing.", "concurrent.", "whynan.")  # workers of loaders and pools


@dataclass(frozen=True, slots=True)
class Watched:
    """A function to run in another process, with a guard of its own around it."""

    function: Callable[..., Any]
    options: Options
    directory: Path | None
    name: str  # of the files it writes, where no process group says which rank it is
    notes: Path  # a folder for a word to the parent: an exit status alone could be the program's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "torch" not in sys.modules:
            return self.function(*args, **kwargs)
        from whynan.engine.guard import Guard, leave_all
        from whynan.errors import TrainingStopped
        from whynan.integrations.meeting import introduce
        from whynan.report.journal import Journal

        leave_all()
        try:
            with introduce(Guard(self.options, Journal(self.directory, files=True, beside=self.name))):
                return self.function(*args, **kwargs)
        except TrainingStopped:
            with suppress(OSError):
                (self.notes / str(os.getpid())).touch()
            sys.exit(STOPPED)


class Children:
    """The processes that a watched script starts."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self._owner = guard, os.getpid()
        self._started = 0
        self._notes: Path | None = None
        self.stopped = False  # whynan stopped one of them; known at the end

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch every process that is started from here on, until the end of the block."""
        start = BaseProcess.start
        children = self

        def watched_start(self: BaseProcess) -> None:
            children._wrap(self)
            start(self)

        BaseProcess.start = watched_start  # type: ignore[method-assign]
        try:
            yield
        finally:
            BaseProcess.start = start  # type: ignore[method-assign]
            if self._notes is not None and os.getpid() == self._owner:  # not in a fork of the script that comes to its end
                self.stopped = any(self._notes.iterdir())
                shutil.rmtree(self._notes, ignore_errors=True)

    def _wrap(self, process: Any) -> None:
        target, args = process._target, process._args
        module = getattr(target, "__module__", "") or ""
        if module == _SPAWN and args and callable(args[0]):
            process._args = (self._around(args[0]), *args[1:])
        elif callable(target) and not f"{module}.".startswith(_LEFT_ALONE) and not _is_installed(module):
            process._target = self._around(target)

    def _around(self, function: Callable[..., Any]) -> Watched:
        self._started += 1
        if self._notes is None:
            self._notes = Path(tempfile.mkdtemp(prefix="whynan-"))
        return Watched(function, self._guard.options, self._guard.journal.directory, f"process-{self._started}", self._notes)


def _is_installed(module: str) -> bool:
    """Whether a module belongs to a library: its workers are its own affair."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "-packages" in file
