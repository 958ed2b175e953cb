"""WN607: whether loaded state replaced the learning rate that the script configured.

What a script configured is the rate its parameter groups and schedulers hold just before the load: the base rate
(`initial_lr`, `base_lrs`), or the rate itself where no scheduler has set one. A normal resume brings back the same
base rate with a decayed current one, and is silent.

A script may set the rate again after loading. So an override is noted at the load and told at the first step after
it, or at the end of the run, if the loaded rate is still there. "Still there" is a question of identity: a script
that computes its rate anew for every step may well arrive at an equal number.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from whynan.capsule.sites import Site, resolve
from whynan.causes.catalogue import rules
from whynan.records import Action, Cause, Confidence, Incident, Origin, Phase, Remedy, Symptom, number, number_of


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates an optimizer or scheduler holds at one moment, by parameter group."""

    base: tuple[float, ...]
    known: bool = True  # these are base rates, not ones that a decay may have lowered
    held: tuple[tuple[object, object, float], ...] = ()  # the very objects, to tell whether they were replaced, and the rate now
    peak: tuple[float | None, ...] = ()  # the largest rate of a cycle, which is what the script says; the base rate follows from it


@dataclass(frozen=True, slots=True)
class Change:
    """One group's rate, as configured and as loaded."""

    group: int
    configured: float
    loaded: float


@dataclass(frozen=True, slots=True)
class Override:
    """A load that replaced the configured rate."""

    what: str  # optimizer or scheduler
    changes: tuple[Change, ...]
    site: Site | None


def before_load(owner: Any) -> Rates | None:
    """Return the rates a script configured, or None for an owner that has none or has already trained with them."""
    if hasattr(owner, "param_groups"):
        return _of_optimizer(owner) if _untrained(owner) else None
    base = getattr(owner, "base_lrs", None)
    return Rates(tuple(map(float, base))) if isinstance(base, list) else None


def overridden(configured: Rates, loaded: Rates) -> tuple[Change, ...]:
    """Compare the rates before and after a load.

    A rate that is lower than the configured one, with no base rate stored beside it, is taken for a decayed one.

    >>> overridden(Rates((1e-4,), known=False), Rates((1e-3,), known=False))
    (Change(group=0, configured=0.0001, loaded=0.001),)
    >>> overridden(Rates((1e-3,), known=False), Rates((1e-4,), known=False))
    ()
    """
    pairs = enumerate(zip(configured.base, loaded.base, strict=False))
    changed = [Change(i, a, b) for i, (a, b) in pairs if not math.isclose(a, b, rel_tol=1e-6) and (loaded.known or not b < a)]
    return tuple(_at_peak(change, configured.peak, loaded.peak) for change in changed)


def _at_peak(change: Change, configured: tuple[float | None, ...], loaded: tuple[float | None, ...]) -> Change:
    """Tell the rate as the script says it: OneCycleLR and CyclicLR are given the largest one."""
    if change.group >= min(len(configured), len(loaded)):
        return change
    before, after = configured[change.group], loaded[change.group]
    return change if before is None or after is None or before == after else Change(change.group, before, after)


def _of_optimizer(optimizer: Any) -> Rates:
    groups = [g for g in optimizer.param_groups if number_of(g.get("lr")) is not None]  # others find their rates themselves
    rates = [number_of(g["lr"]) or 0.0 for g in groups]
    base = tuple(rate if (first := number_of(g.get("initial_lr"))) is None else first for g, rate in zip(groups, rates, strict=True))
    peak = tuple(float(g["max_lr"]) if isinstance(g.get("max_lr"), int | float) else None for g in groups)
    return Rates(base, all("initial_lr" in g for g in groups), tuple((g["lr"], g.get("initial_lr"), rate) for g, rate in zip(groups, rates, strict=True)), peak)


def _untrained(optimizer: Any) -> bool:
    """Later loads are a run going back to its own state, with a rate it has had before."""
    states = [s for s in optimizer.state.values() if isinstance(s, Mapping)]
    return all(float(s.get("step", 1)) == 0 for s in states)


class Overrides:
    """The loads of a run that wait for the first step after them."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[weakref.ref[Any], Rates, Rates, Site | None]] = {}
        self._told: set[int] = set()

    def loaded(self, owner: Any, before: Rates, site: Site | None) -> None:
        """Note a load. What was configured before an earlier load of the same owner stays what was configured."""
        earlier = self.waiting.pop(id(owner), None)
        configured = earlier[1] if earlier is not None and earlier[0]() is owner else before
        after = _of_optimizer(owner) if hasattr(owner, "param_groups") else before_load(owner)
        if after is not None and overridden(configured, after):
            self.waiting[id(owner)] = (weakref.ref(owner), configured, after, site)

    def due(self, optimizer: Any = None) -> Iterator[Override]:
        """Yield what is still overridden of the loads that concern an optimizer, or of all; each optimizer is told once."""
        for key, (reference, configured, after, site) in list(self.waiting.items()):
            owner = reference()
            trains = owner if hasattr(owner, "param_groups") else getattr(owner, "optimizer", None)
            if owner is not None and optimizer is not None and trains is not optimizer:
                continue
            del self.waiting[key]
            changes = _remaining(owner, configured, after) if owner is not None else ()
            if changes and id(trains) not in self._told:
                self._told.add(id(trains))
                yield Override("optimizer" if owner is trains else "scheduler", changes, site)


def _remaining(owner: Any, configured: Rates, after: Rates) -> tuple[Change, ...]:
    """Return the changes that the script has not taken back since the load."""
    changes = overridden(configured, after)
    if not hasattr(owner, "param_groups"):
        now = before_load(owner)
        return tuple(c for c in changes if now is not None and c.group < len(now.base) and math.isclose(now.base[c.group], c.loaded, rel_tol=1e-6))
    now = _of_optimizer(owner)
    return tuple(c for c in changes if c.group < len(now.held) and _in_effect(owner, now.held[c.group], after.held[c.group]))


def _in_effect(optimizer: Any, now: tuple[object, object, float], loaded: tuple[object, object, float]) -> bool:
    """The loaded rate is untouched, or a scheduler that was made since works from the loaded base rate."""
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    untouched = now[0] is loaded[0] and now[2] == loaded[2]  # a tensor may be written in place
    return untouched or (scheduled and now[1] is not None and now[1] is loaded[1])


def incident(override: Override, step: int, rank: int = 0) -> Incident:
    """Return the record of an override, with both numbers."""
    rule = rules()["WN607"]
    first = override.changes[0]
    configured, loaded = number(first.configured), number(first.loaded)
    label = f"the script configured a rate of {configured}, the loaded {override.what} has {loaded}"
    more = [f"group {c.group}: {number(c.configured)} configured, {number(c.loaded)} loaded" for c in override.changes[1:]]
    times = f"the loaded rate is {number(first.loaded / first.configured)} times the configured one" if first.configured else ""
    target = "every group's lr" if override.what == "optimizer" else "base_lrs"
    return Incident(
        step=step,
        rank=rank,
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        symptom=Symptom("learning rate", "replaced", f"group {first.group}", f"{configured} configured, {loaded} loaded"),
        origin=Origin(Phase.OPTIMIZER, resolve(override.site)),
        cause=Cause(rule.code, rule.slug, rule.title, Confidence.PROVEN, (label, *filter(None, [times, *more])), label),
        remedies=(Remedy(f"if {configured} is meant, set {target} again after loading; if {loaded} is, configure it in the script"),),
        action=Action("observe", "observed"),
    )
