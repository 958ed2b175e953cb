"""Frameworks that an unchanged script uses, found in `sys.modules` when it matters and never imported by us."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from whynan.integrations.trackers import Trackers

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception
    from whynan.engine.guard import Guard


def introduce(guard: Guard) -> Guard:
    """Make a guard known to the trackers and frameworks of the program; it is handed back."""
    journal = guard.journal
    if not journal.quiet:
        journal.listeners.append(Trackers(journal, lambda: guard.session.window.norm))
    guard.acting.advice, guard.foreign = advice, watch_foreign_optimizers
    return guard


def advice(place: str) -> str:
    """Return what a framework that runs now makes of a bad value at this place, as a line to say; or nothing."""
    if place == "loss" and "transformers.trainer" in sys.modules:
        from whynan.integrations.transformers import about_log

        return about_log()
    return ""


def watch_foreign_optimizers(interception: Interception) -> bool:
    """Stand at the updates of optimizers that are not torch's; return whether there are any."""
    if "keras" not in sys.modules:
        return False
    from whynan.integrations.keras import watch_updates

    watch_updates(interception)
    return True


def lightning() -> list[Any]:
    """Take Lightning's doors if this thread is watched. Lightning calls it for every Trainer; it adds no callback."""
    engine = sys.modules.get("whynan.engine.guard")
    guard = engine.open_guard() if engine is not None else None
    if guard is not None:
        from whynan.integrations.lightning import stand

        guard.session.guarded(lambda: stand(guard))
    return []
