"""`%load_ext whynan`: the training loops in the cells of a notebook are watched; `%whynan` says and switches.

One guard for all cells, in the thread that runs them. What was made in cells before is known. A cell that whynan stopped
can be run again: watching begins anew after it.
"""

from __future__ import annotations

import contextlib
import shlex
from typing import Any

import torch

from whynan.engine.guard import Guard
from whynan.engine.options import Options
from whynan.errors import TrainingStopped, UsageError
from whynan.integrations.meeting import introduce
from whynan.report import cells
from whynan.report.journal import Journal

_HELP = "%whynan [status | on [POLICY] | off]"
_watchers: list[CellWatcher] = []


class CellWatcher:
    """Watches the cells of one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.policy = "skip"
        self.guard: Guard | None = None

    def on(self, policy: str = "") -> None:
        """Begin to watch, with the models and optimizers that are there already."""
        options = Options(policy=policy or self.policy)
        self.off()
        self.policy = policy or self.policy
        self.guard = introduce(Guard(options, Journal(None, files=True))).open()
        self.guard.attach(*[item for item in self.shell.user_ns.values() if isinstance(item, torch.optim.Optimizer)])

    def off(self) -> None:
        """End watching; torch is left as it was."""
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.close()

    def ran(self, result: Any) -> None:
        """A cell is over: settle what a device still had to answer, explain what it raised, begin anew after a stop."""
        guard = self.guard
        if guard is None or not guard.watches:
            return
        error = result.error_in_exec
        if isinstance(error, Exception):
            guard.failed_with(error)
        with contextlib.suppress(TrainingStopped):  # said already; the cell has ended by itself
            guard.session.guarded(guard.waiting.settle)
        if guard.stopped:
            self.on()

    def status(self) -> Status:
        """Return where it stands."""
        if self.guard is None:
            return Status(cells.standing(0, [], False))
        return Status(cells.standing(self.guard.session.step_count, self.guard.journal.incidents, self.guard.watches))

    def magic(self, line: str) -> Status | None:
        """Switch the watching of cells on or off, or say where it stands: %whynan [status | on [POLICY] | off]."""
        words = shlex.split(line)
        if words[:1] in ([], ["status"]):
            return self.status()
        if words[0] == "on" and len(words) <= 2:
            self.on(*words[1:])
        elif words == ["off"]:
            self.off()
        else:
            raise UsageError(f"%whynan takes no {line!r}: {_HELP}")
        return None


class Status:
    """A text that a notebook shows in colours."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return cells.page(self._text)


def load_ipython_extension(shell: Any) -> None:
    """Begin to watch the cells of a shell; a second time it changes nothing."""
    if any(watcher.shell is shell for watcher in _watchers):
        return
    watcher = CellWatcher(shell)
    _watchers.append(watcher)
    shell.register_magic_function(watcher.magic, "line", "whynan")
    shell.events.register("post_run_cell", watcher.ran)
    watcher.on()


def unload_ipython_extension(shell: Any) -> None:
    """End it."""
    for watcher in [w for w in _watchers if w.shell is shell]:
        _watchers.remove(watcher)
        shell.events.unregister("post_run_cell", watcher.ran)
        shell.magics_manager.magics["line"].pop("whynan", None)
        watcher.off()
