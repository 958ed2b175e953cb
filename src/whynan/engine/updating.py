"""What the optimizer would have done with the bad gradients: tried on a copy of it, in the failing step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from whynan.capsule.doors.collectives import several
from whynan.capsule.snapshot import copy_of
from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.capsule.stepped import has_hooks, unwatched_step
from whynan.errors import let_through
from whynan.records import Experiment, Incident, count, number
from whynan.tripwire.checks import parameters_of
from whynan.tripwire.values import damage_of

MOST = 256 << 20  # bytes of weights that are copied for it


@dataclass(frozen=True, slots=True)
class _Update:
    """What an update did."""

    bad: int  # weights that are not finite after it
    total: int
    hit: int  # weights with a bad gradient
    moved: float  # the furthest that one of these went


def with_update(incident: Incident, optimizer: Any) -> Incident:
    """Add to an incident what this optimizer makes of the step's gradients: most die, one that takes signs does not."""
    try:
        found = _tried(optimizer) if _fit(optimizer) else None
    except Exception as error:  # an optimizer that cannot be copied keeps its secret
        let_through(error)
        found = None
    if found is None:
        return incident
    name = type(optimizer).__name__
    if found.bad:
        answer = f"{name} would make {count(found.bad)} of {count(found.total)} weights non-finite"
        return replace(incident, experiments=(*incident.experiments, Experiment("the update with these gradients", answer)))
    moved = f"move by up to {number(found.moved)}" if found.moved else "do not move"
    answer = f"{name} would leave all {count(found.total)} weights finite, by accident: the {count(found.hit)} with a bad gradient {moved}"
    cause = replace(incident.cause, evidence=(*incident.cause.evidence, answer))
    return replace(incident, cause=cause, experiments=(*incident.experiments, Experiment("the update with these gradients", answer)))


def _fit(optimizer: Any) -> bool:
    """Whether there are bad gradients, and a copy is small and has no side effects."""
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith("torch.distributed"):
        return False
    if several():  # a step may hold collectives, and the other ranks do not make this one
        return False
    if has_hooks(optimizer):
        return False
    if any(isinstance(value, torch.nn.Module | torch.optim.Optimizer) for value in vars(optimizer).values()):
        return False
    weights = parameters_of(optimizer)
    plain = all(type(p) in (torch.nn.Parameter, torch.Tensor) for p in weights)
    return plain and sum(p.numel() * p.element_size() for p in weights) <= MOST and any(p.grad is not None and damage_of(p.grad) for p in weights)


def _tried(optimizer: torch.optim.Optimizer) -> _Update:
    """Step a copy, and compare its weights with those it had."""
    stand_ins: dict[int, torch.Tensor] = {}
    for weight in parameters_of(optimizer):
        fresh = stand_ins[id(weight)] = weight.detach().clone().requires_grad_(weight.requires_grad)
        fresh.grad = None if weight.grad is None else weight.grad.detach().clone()
    trial = copy_of(optimizer, stand_ins)
    hit = [~torch.isfinite(p.grad.to_dense()) if p.grad is not None else torch.zeros_like(p, dtype=torch.bool) for p in parameters_of(trial)]
    rng = take_rng(others=True)
    try:
        unwatched_step(trial)(trial)
    finally:
        put_rng(rng)
    pairs = [(new.detach(), old.detach()) for new, old in zip(parameters_of(trial), parameters_of(optimizer), strict=True)]
    moves = [(new - old)[mask].abs().max() for (new, old), mask in zip(pairs, hit, strict=True) if mask.any()]
    return _Update(
        sum(int((~torch.isfinite(new)).sum()) for new, _ in pairs),
        sum(new.numel() for new, _ in pairs),
        sum(int(mask.sum()) for mask in hit),
        max(map(float, moves), default=0.0),
    )
