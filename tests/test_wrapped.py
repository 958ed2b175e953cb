"""An optimizer made before watching that holds another one: given to `watch`, both are watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import whynan


class TwoSteps(torch.optim.Optimizer):
    """Sharpness-aware: moves the weights up by the first gradients, back, and on by its inner optimizer."""

    def __init__(self, params: Any, inner: type[torch.optim.Optimizer], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base_optimizer = inner(self.param_groups, lr=lr)  # type: ignore[call-arg]
        self.moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def first_step(self) -> None:
        """Move up."""
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.moved = [(p, 0.01 * p.grad) for p in held if p.grad is not None]
        for weight, by in self.moved:
            weight.add_(by)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Move back, and step."""
        for weight, by in self.moved:
            weight.sub_(by)
        self.base_optimizer.step()
        self.zero_grad()


class Around(torch.optim.Optimizer):
    """A wrapper whose inner optimizer the loop steps itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def _sharpness_aware(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Callable[[torch.Tensor], None]]:
    optimizer = TwoSteps(model.parameters(), torch.optim.SGD, 0.05)

    def turn(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.first_step()
        model(x).square().mean().backward()
        optimizer.second_step()

    return optimizer, turn


def _stepped_inside(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Callable[[torch.Tensor], None]]:
    outer = Around(Around(torch.optim.Adam(model.parameters(), 0.05)))

    def turn(x: torch.Tensor) -> None:
        outer.optimizer.optimizer.zero_grad()  # type: ignore[attr-defined]
        model(x).square().mean().backward()
        outer.optimizer.optimizer.step()  # type: ignore[attr-defined]

    return outer, turn


@pytest.mark.parametrize("make", [_sharpness_aware, _stepped_inside])
def test_inner_optimizer_is_watched_with_its_wrapper(make: Callable[..., Any]) -> None:
    """Its steps are counted, and a bad batch leaves nothing in the running statistics."""
    ends = []
    for bad in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer, turn = make(model)
        with whynan.watch(model, optimizer, files=False) if bad else contextlib.nullcontext() as guard:
            for step, x in enumerate(torch.randn(8, 16, 4)):
                if step != 5 or bad:
                    turn(x * float("nan") if step == 5 else x)
        if guard is not None:
            assert {i.step for i in guard.incidents} <= {5, 6} and guard.incidents[-1].action.taken == "skipped"
        ends.append([*model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
