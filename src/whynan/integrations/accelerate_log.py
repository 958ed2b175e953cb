"""Accelerate's `log`: trackers of an `Accelerator` that are not told directly (Comet, Aim, ClearML, one of the user's own)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whynan.integrations.telling import Telling, living, loaded

_TOLD_DIRECTLY = ("wandb", "tensorboard", "mlflow", "trackio")


def find() -> list[Any]:
    """Return the trackers of every accelerator that is alive."""
    state = loaded("accelerate.state")
    if state is not None and not state.is_initialized():
        return []  # nobody has made an accelerator; to look for one takes a walk over all objects
    trackers = [t for accelerator in living("accelerate.accelerator", "Accelerator") for t in getattr(accelerator, "trackers", [])]
    return [t for t in trackers if getattr(t, "name", "") not in _TOLD_DIRECTLY]


def tell(run: Any, telling: Telling) -> None:
    """Log the values, without a step: what the tracker makes of that is its own."""
    run.log(telling.numbers())


def attach(run: Any, report: Path) -> None:
    """Hand the report to trackers that take files."""
    take = getattr(run, "log_artifact", None)
    if take is not None:
        take(str(report))
