"""An optimizer's step made again. What its closure gave was kept, so that nothing of the program is called. Needs torch only: `repro.py` stands on it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Evaluation = list[Any]  # what a closure gave: its loss, then the gradient of each weight


class _Over(BaseException):
    """No more evaluations were kept. No `Exception`: an optimizer's own handler must not swallow it."""


def unwatched_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the `step` of an optimizer's class without any door of ours."""
    step: Any = type(optimizer).step
    while hasattr(step, "_whynan"):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the program has hung something on the updates of an optimizer, or of all: it would see a trial."""
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def is_of_a_library(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer is no code of the program, which may count, write and draw."""
    return "-packages" in inspect.unwrap(unwatched_step(optimizer)).__code__.co_filename


def step_again(optimizer: torch.optim.Optimizer, *given: Evaluation | None) -> None:
    """Make a step with the gradients that are there, or, where it has a closure, with what was `given`.

    That is what there was before its first evaluation, then what each gave, and None for one that met broken weights.
    It ends where no more was kept; the gradients of the last evaluation stay in place.
    """
    step, kept = unwatched_step(optimizer), iter(given)

    def closure(*_: Any, **__: Any) -> Any:
        evaluation = next(kept, None)
        if evaluation is None:
            raise _Over
        _put_gradients(optimizer, evaluation)
        return evaluation[0]

    if not given:
        step(optimizer)
        return
    closure()
    with contextlib.suppress(_Over):
        step(optimizer, closure)


def _put_gradients(optimizer: torch.optim.Optimizer, evaluation: Evaluation) -> None:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for weight, grad in zip(weights, evaluation[1:], strict=True):
        weight.grad = None if grad is None else grad.clone()  # the optimizer may write to it
