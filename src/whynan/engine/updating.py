"""What the optimizer would have done with the bad gradients: tried on a copy of it, in the failing step."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.state import put_rng, take_rng
from whynan.records import Experiment, Incident, count
from whynan.tripwire.values import damage_of

MOST = 256 << 20  # bytes of weights that are copied for it


def with_update(incident: Incident, optimizer: Any) -> Incident:
    """Add to an incident what this optimizer makes of the step's gradients: most die, one that takes signs does not."""
    if not _fit(optimizer):
        return incident
    try:
        bad, total = _tried(optimizer)
    except Exception:  # an optimizer that cannot be copied keeps its secret
        return incident
    name = type(optimizer).__name__
    if bad:
        answer = f"{name} would make {count(bad)} of {count(total)} weights non-finite"
        return replace(incident, experiments=(*incident.experiments, Experiment("the update with these gradients", answer)))
    answer = f"{name} would leave all {count(total)} weights finite, by accident: the bad gradients count as 0 there"
    cause = replace(incident.cause, evidence=(*incident.cause.evidence, answer))
    return replace(incident, cause=cause, experiments=(*incident.experiments, Experiment("the update with these gradients", answer)))


def _fit(optimizer: Any) -> bool:
    """Whether there are bad gradients, and a copy is small and has no side effects."""
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith("torch.distributed"):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if any(isinstance(value, torch.nn.Module) for value in vars(optimizer).values()):
        return False
    weights = _weights(optimizer)
    plain = all(type(p) in (torch.nn.Parameter, torch.Tensor) for p in weights)
    return plain and sum(p.numel() * p.element_size() for p in weights) <= MOST and any(p.grad is not None and damage_of(p.grad) for p in weights)


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Copy an optimizer with its weights and gradients; not by its constructor, which would announce a new one."""
    memo: dict[int, Any] = {}
    for weight in _weights(optimizer):
        fresh = memo[id(weight)] = weight.detach().clone().requires_grad_(weight.requires_grad)
        fresh.grad = None if weight.grad is None else weight.grad.detach().clone()
    trial: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(trial).update(copy.deepcopy({k: v for k, v in vars(optimizer).items() if k != "step"}, memo))
    return trial


def _tried(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Step a copy; return how many of its weights are not finite then, and how many there are."""
    trial = _copied(optimizer)
    step: Any = type(trial).step
    while hasattr(step, "_whynan"):
        step = step.__wrapped__
    rng = take_rng(everything=True)
    try:
        step(trial)
    finally:
        put_rng(rng)
    weights = _weights(trial)
    return sum(int((~torch.isfinite(w.detach())).sum()) for w in weights), sum(w.numel() for w in weights)
