"""MLflow: metrics and tags of the active run, the report as an artifact, also after the run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whynan.integrations.telling import Telling, loaded


def find() -> list[Any]:
    """Return the id of the active run."""
    active = getattr(loaded("mlflow"), "active_run", None)
    run = active() if active is not None else None
    return [] if run is None else [run.info.run_id]


def tell(run: Any, telling: Telling) -> None:
    """Log the values at the step of the incident; tag the run with the first."""
    client = _client()
    for key, value in telling.numbers().items():
        client.log_metric(run, key, value, step=telling.incident.step)
    client.set_tag(run, "whynan.total", str(telling.incident.action.total))
    client.set_tag(run, "whynan.action", telling.incident.action.taken)
    if telling.alert:
        client.set_tag(run, "whynan.alert", telling.title)
        client.set_tag(run, "whynan.code", telling.incident.cause.code)


def attach(run: Any, report: Path) -> None:
    """Log the report as an artifact."""
    _client().log_artifact(run, str(report), "whynan")


def _client() -> Any:
    return loaded("mlflow").MlflowClient()
