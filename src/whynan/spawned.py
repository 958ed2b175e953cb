"""Processes that a script under `whynan run` starts by itself: `mp.spawn`, `mp.Process`. Each is watched like the script.

Does not import torch: a process that simulates or reads files must not pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
            sys.exit(STOPPED)


class Children:
    """The processes that were started and are watched."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._started: list[BaseProcess] = []

    @property
    def stopped(self) -> bool:
        """Whether whynan stopped one of them."""
        return any(process.exitcode == STOPPED for process in self._started)

    @contextmanager
    def watched(self) -> Iterator[Children]:
        """Watch every process that is started from here on, until the end of the block."""
        start = BaseProcess.start
        children = self

        def watched_start(self: BaseProcess) -> None:
            children._wrap(self)
            start(self)

        BaseProcess.start = watched_start  # type: ignore[method-assign]
        try:
            yield self
        finally:
            BaseProcess.start = start  # type: ignore[method-assign]

    def _wrap(self, process: Any) -> None:
        target, args = process._target, process._args
        module = getattr(target, "__module__", "") or ""
        if module == _SPAWN and args and callable(args[0]):
            process._args = (self._around(process, args[0]), *args[1:])
        elif callable(target) and not f"{module}.".startswith(_LEFT_ALONE) and not _is_installed(module):
            process._target = self._around(process, target)

    def _around(self, process: BaseProcess, function: Callable[..., Any]) -> Watched:
        self._started.append(process)
        return Watched(function, self._guard.options, self._guard.journal.directory, f"process-{len(self._started)}")


def _is_installed(module: str) -> bool:
    """Whether a module belongs to a library: its workers are its own affair."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "-packages" in file
