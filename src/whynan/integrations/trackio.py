"""Trackio: the current run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from whynan.integrations.telling import Telling, loaded


def find() -> list[Any]:
    """Return the current run."""
    current = getattr(loaded("trackio.context_vars"), "current_run", None)
    run = current.get() if current is not None else None
    return [] if run is None else [run]


def tell(run: Any, telling: Telling) -> None:
    """Log the values at the step the run is at; alert once."""
    following = run._next_step
    run.log(telling.values(), step=max(following - 1, 0))
    run._next_step = following  # the step that the program's own next row would have had
    if telling.alert:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what whynan has printed already
            run.alert(title=telling.title, text=telling.diagnosis, level=loaded("trackio").AlertLevel.ERROR)


def attach(run: Any, report: Path) -> None:
    """Log the report as an artifact of the run."""
    if run in find():
        run.log_artifact(report, name="whynan-report", type="report")
