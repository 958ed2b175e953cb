"""What a tracker is told at an incident, in the forms that trackers take."""

from __future__ import annotations

import gc
import sys
import weakref
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


_FOUND: dict[type, tuple[list[int], list[weakref.ref[Any]]]] = {}


def living(module: str, name: str) -> list[Any]:
    """Find the objects of a class of a module that the program has imported.

    Cost: a walk over all objects (70 ms in a large program) where some came or went since the last time: each refers to its class.
    """
    cls = getattr(loaded(module), name, None)
    if not isinstance(cls, type):
        return []
    kinds = dict.fromkeys(_kinds(cls))
    counts, known = [sys.getrefcount(kind) for kind in kinds], _FOUND.get(cls)
    items = [ref() for ref in known[1]] if known is not None and known[0] == counts else [None]
    if None in items:
        items = [item for item in gc.get_referrers(*kinds) if type(item) in kinds]
        _FOUND[cls] = counts, [weakref.ref(item) for item in items]
    return items


def _kinds(cls: type) -> Iterator[type]:
    yield cls
    inner: type
    for inner in cls.__subclasses__():
        yield from _kinds(inner)
