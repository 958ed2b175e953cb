"""Experiment trackers that the program uses are told of incidents; none is ever imported here.

They are looked for in `sys.modules` at an incident and at the end of the run, never in a step. What a tracker raises is
said once and costs nothing else. The step counter of the user's own values does not move.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from whynan.errors import let_through
from whynan.integrations import accelerate_log, mlflow, tensorboard, trackio, wandb
from whynan.integrations.telling import Telling
from whynan.records import Incident
from whynan.report import terminal
from whynan.report.journal import Journal
from whynan.report.writing import write_report


class Tracker(Protocol):
    """One library: find its live runs, tell them of an incident, hand them a file."""

    def find(self) -> Iterable[Any]: ...
    def tell(self, run: Any, telling: Telling) -> None: ...
    def attach(self, run: Any, report: Path) -> None: ...


KNOWN: dict[str, Tracker] = {
    "wandb": wandb,  # type: ignore[dict-item]  # a module with these three functions
    "tensorboard": tensorboard,  # type: ignore[dict-item]
    "mlflow": mlflow,  # type: ignore[dict-item]
    "trackio": trackio,  # type: ignore[dict-item]
    "accelerate": accelerate_log,  # type: ignore[dict-item]
}


@dataclass(slots=True)
class _Told:
    """A run of a tracker that was told something: it gets the report."""

    name: str
    run: Any


class Trackers:
    """Tells the trackers of one watched run.

    Cost: nothing until there is an incident; then one walk over the objects of the process.
    """

    def __init__(self, journal: Journal, norm: Callable[[], object] = lambda: None) -> None:
        self._journal, self._norm = journal, norm
        self._told: list[_Told] = []
        self._failed: set[str] = set()

    def incident(self, incident: Incident) -> None:
        """Tell every live run; one alert for each, at its first incident, with the report so far."""
        self._quietly("trackers", lambda: self._tell(incident))

    def _tell(self, incident: Incident) -> None:
        telling = Telling(incident, terminal.diagnosis(incident), _number(self._norm()))
        for name, tracker in KNOWN.items():
            self._quietly(name, lambda name=name, tracker=tracker: self._tell_one(name, tracker, telling))  # type: ignore[misc]

    def _tell_one(self, name: str, tracker: Tracker, telling: Telling) -> None:
        for run in tracker.find():
            new = all(told.run is not run and (not isinstance(run, str) or told.run != run) for told in self._told)  # MLflow's is an id
            telling.alert = new
            tracker.tell(run, telling)
            if new:
                self._told.append(_Told(name, run))
            if new and (report := self._so_far()) is not None:
                tracker.attach(run, report)

    def closed(self) -> None:
        """Hand the finished report to every run that was told of an incident."""
        home = self._journal.directory if self._journal.files else None
        report = _report_in(home) if home is not None else None
        for told in self._told if report is not None else ():
            self._quietly(told.name, lambda told=told: KNOWN[told.name].attach(told.run, report))  # type: ignore[misc, arg-type]

    def _so_far(self) -> Path | None:
        """Write the report at once: a run may be finished by the program before the watching ends."""
        journal = self._journal
        home = journal.home()
        if home is None:
            return None
        return write_report(home)

    def _quietly(self, name: str, action: Callable[[], None]) -> None:
        state = random.getstate()  # the user's numbers must not move
        try:
            action()
        except Exception as error:
            let_through(error)
            if name not in self._failed:
                self._failed.add(name)
                self._journal.say(f"whynan: {name} could not be told: {type(error).__name__}: {error}")
        finally:
            random.setstate(state)


def _report_in(home: Path) -> Path | None:
    return next((home / name for name in ("report.html", "report.md") if (home / name).exists()), None)


def _number(norm: Any) -> float | None:
    """Return a norm that the host knows; one on a device is not waited for."""
    if norm is None or not getattr(norm, "is_cpu", True):
        return None
    return float(norm)
