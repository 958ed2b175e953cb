"""`whynan.watch`: the way in for a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from whynan.capsules import LIMIT
from whynan.errors import UsageError
from whynan.guard import Guard
from whynan.recovery.policy import Policy
from whynan.report.journal import Journal

F = TypeVar("F", bound=Callable[..., Any])


class Watch:
    """What `watch` returns: `step`, `close`, and the incidents so far. Also a `with` block."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    @property
    def incidents(self) -> list[Any]:
        """The incidents seen so far."""
        return list(self._guard.journal.incidents)

    @property
    def run_dir(self) -> Path | None:
        """Where the files are, once something was written."""
        return self._guard.journal.directory

    def step(self, function: F) -> F:
        """Mark a step function: a bad step is replayed by calling it again, exactly.

        The function gets the batch, runs forward and backward, and may step the optimizer; during a replay the
        optimizer's step is left out. What it does besides (appending to lists, printing) happens again.
        """
        return self._guard.step_function(function)

    def close(self) -> None:
        """End watching; torch is left as it was."""
        self._guard.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._guard.__exit__(kind, error, trace)


def watch(
    *objects: Any,
    policy: str = "skip",
    in_a_row: int = 3,
    in_total: int = 10,
    run_dir: str | Path | None = None,
    files: bool = True,
    capsule_limit: int = LIMIT,
) -> Watch:
    """Watch training in this thread: models and optimizers given here, and any made later.

    >>> import torch, whynan
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with whynan.watch(model, optimizer, files=False) as guard:
    ...     loss = model(torch.ones(4, 2)).pow(2).mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> guard.incidents
    []

    Cost: 1-4 microseconds for each torch call outside modules, one pass over the gradients where they are not clipped.
    """
    for item in objects:
        if not isinstance(item, torch.nn.Module | torch.optim.Optimizer):
            raise UsageError(f"watch() takes models and optimizers, not {type(item).__name__}")
    try:
        chosen = Policy(policy)
    except ValueError:
        raise UsageError(f"unknown policy {policy!r}; choose one of {', '.join(Policy)}") from None
    for name, value in (("in_a_row", in_a_row), ("in_total", in_total), ("capsule_limit", capsule_limit)):
        if not isinstance(value, int) or value < 0:
            raise UsageError(f"{name} is a whole number from 0 on, not {value!r}")
    journal = Journal(Path(run_dir) if run_dir is not None else None, files=files)
    guard = Guard(chosen, in_a_row, in_total, journal, capsule_limit).open()
    guard.attach(*objects)
    return Watch(guard)
