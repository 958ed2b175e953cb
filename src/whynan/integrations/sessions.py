"""What the callbacks share: a guard of their own, unless `whynan run` or `whynan.watch` watches already."""

from __future__ import annotations

from typing import Any

import torch

from whynan.engine.guard import Guard, open_guard
from whynan.engine.options import Options
from whynan.errors import UsageError
from whynan.watching import Watch, watch

_OF_WATCH = ("run_dir", "files", "averages", "keep", "allow")


class OwnWatch:
    """A watch that begins and ends with the training of a framework; one that is open already is used and left open.

    >>> own = OwnWatch({"policy": "stop", "files": False})
    >>> own.begin(torch.nn.Linear(1, 1))
    >>> own.guard is not None
    True
    >>> own.end()
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._watch: Watch | None = None
        try:
            Options(**{k: v for k, v in options.items() if k not in _OF_WATCH})  # told where the callback is made, not when the training begins
        except TypeError as error:
            raise UsageError(f"WhynanCallback takes the options of whynan.watch: {str(error).rpartition('() ')[2]}") from None

    @property
    def guard(self) -> Guard | None:
        """The guard that watches this thread, whoever opened it."""
        return open_guard()

    @property
    def mine(self) -> bool:
        """Whether the watch was begun here and is open."""
        return self._watch is not None

    def begin(self, *objects: Any) -> None:
        """Watch these models and optimizers."""
        guard = open_guard()
        wanted = [inner_optimizer(o) if isinstance(o, torch.optim.Optimizer) else o for o in objects]
        if guard is None:
            self._watch = watch(*wanted, **self.options)
        else:
            guard.attach(*(o for o in wanted if isinstance(o, torch.optim.Optimizer) and all(o is not k for k in guard.session.optimizers)))

    def failed(self, error: BaseException) -> None:
        """The training raised: diagnose it, and end."""
        if self._watch is not None and self.guard is not None:
            self.guard.failed_with(error)
        self.end()

    def end(self) -> None:
        """End what was begun here."""
        own, self._watch = self._watch, None
        if own is not None:
            own.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_watch": None}  # a copy in another process watches for itself


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer below the wrappers of a framework (Accelerate's, Lightning's)."""
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return inner_optimizer(inner)
    return optimizer
