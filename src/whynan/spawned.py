"""Processes that a script under `whynan run` starts by itself: `mp.spawn`, `mp.Process`. Each is watched like the script.

Does not import torch: a process that simulates or reads files must not pay for it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from whynan.errors import TrainingStopped

if TYPE_CHECKING:
    from whynan.engine.guard import Guard
    from whynan.engine.options import Options

STOPPED = 3  # the exit status of a process that whynan stopped
_SPAWN = "torch.multiprocessing.spawn"
_LEFT_ALONE = ("torch.", "multiprocessing.", "concurrent.", "whynan.")  # workers of loaders and pools


class Sealed:
    """Options of a watched run, that come out of a pickle as bytes until somebody asks for them: their class takes torch to import."""

    def __init__(self, options: Options) -> None:
        self._options: Options | bytes = options

    def __getstate__(self) -> dict[str, bytes]:
        return {"_options": self._options if isinstance(self._options, bytes) else pickle.dumps(self._options)}

    def opened(self) -> Options:
        """Return the options."""
        return pickle.loads(self._options) if isinstance(self._options, bytes) else self._options  # noqa: S301 (of the parent process)


@dataclass(frozen=True, slots=True)
class Watched:
    """A function to run in another process, with a guard of its own around it from when torch is there."""

    function: Callable[..., Any]
    options: Sealed
    directory: Path | None
    name: str  # of the files it writes, where no process group says which rank it is
    notes: Path  # a folder for a word to the parent: an exit status alone could be the program's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with ExitStack() as stack:
                _once_torch_is_there(lambda: stack.enter_context(self._guard()))
                return self.function(*args, **kwargs)
        except TrainingStopped:
            with suppress(OSError):
                (self.notes / str(os.getpid())).touch()
            sys.exit(STOPPED)

    def _guard(self) -> Guard:
        from whynan.engine.guard import Guard, leave_all
        from whynan.integrations.meeting import introduce
        from whynan.report.journal import Journal

        leave_all()
        return introduce(Guard(self.options.opened(), Journal(self.directory, files=True, beside=self.name)))


def _once_torch_is_there(then: Callable[[], object]) -> None:
    """Do something now, or right after the process imports torch: one that never does is left as it is."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaiting(then))


class _Awaiting(MetaPathFinder):
    """Finds torch as the others do, and sees when it is imported."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Stay until it is imported: many ask whether there is a torch before they do (`importlib.util.find_spec`)."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if module.__name__ == "torch" and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module


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
        return Watched(function, Sealed(self._guard.options), self._guard.journal.directory, f"process-{self._started}", self._notes)


def _is_installed(module: str) -> bool:
    """Whether a module belongs to a library: its workers are its own affair."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "-packages" in file
