"""Weights & Biases, also offline.

Values go with the row that the program logs next (`commit=False`), on a step of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whynan.integrations.telling import Telling, loaded


def find() -> list[Any]:
    """Return the run of this process."""
    run = getattr(loaded("wandb"), "run", None)
    return [] if run is None else [run]


def tell(run: Any, telling: Telling) -> None:
    """Log the values; alert once."""
    if telling.alert:
        run.define_metric("whynan/incident_step", hidden=True)
        run.define_metric("whynan/*", step_metric="whynan/incident_step")
        run.alert(title=telling.title[:64], text=f"```\n{telling.diagnosis}\n```", level="ERROR")
    run.log(telling.values(), commit=False)


def attach(run: Any, report: Path) -> None:
    """Put the report among the files of the run; a later text of it replaces this one when the run ends."""
    if find() == [run]:  # else it was finished, with the report of the last incident
        run.save(str(report), base_path=str(report.parent), policy="end")
