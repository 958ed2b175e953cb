"""What a tracker is told at an incident, in the forms that trackers take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from whynan.records import Incident


@dataclass(slots=True)
class Telling:
    """One incident for one tracker."""

    incident: Incident
    diagnosis: str
    norm: float | None = None
    alert: bool = True  # not told to this run before

    @property
    def title(self) -> str:
        """One line.

        >>> from whynan.records import NOWHERE, Cause, Confidence, Incident, Origin, Phase, Symptom
        >>> cause = Cause("WN501", "infinite-slope", "infinite slope", Confidence.PROVEN)
        >>> incident = Incident(88, 0, "", Symptom("gradient", "nan", "w"), Origin(Phase.BACKWARD, NOWHERE), cause)
        >>> Telling(incident, "").title
        'whynan: WN501 at step 88: infinite slope'
        """
        return f"whynan: {self.incident.cause.code} at step {self.incident.step}: {self.incident.cause.title}"

    def numbers(self) -> dict[str, float]:
        """The values for trackers that take numbers only; the code is its number."""
        values: dict[str, float] = {
            "whynan/incident_step": self.incident.step,
            "whynan/code": int(self.incident.cause.code.removeprefix("WN")),
            "whynan/total": self.incident.action.total,
        }
        if self.norm is not None:
            values["whynan/grad_norm"] = self.norm
        return values

    def values(self) -> dict[str, float | str]:
        """The values for trackers that take text as well."""
        return {**self.numbers(), "whynan/code": self.incident.cause.code, "whynan/action": self.incident.action.taken}


def loaded(module: str) -> Any:
    """Return a module that the program has imported, or None."""
    return sys.modules.get(module)


def living(module: str, name: str) -> Iterator[Any]:
    """Find the objects of a class of a module that the program has imported."""
    import gc

    cls = getattr(loaded(module), name, None)
    if isinstance(cls, type):
        kinds = set(_kinds(cls))
        yield from [item for item in gc.get_referrers(*kinds) if type(item) in kinds]  # an object refers to its class; twice as fast as to ask each object


def _kinds(cls: type) -> Iterator[type]:
    yield cls
    inner: type
    for inner in cls.__subclasses__():
        yield from _kinds(inner)
