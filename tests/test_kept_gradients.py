"""Loops that do not zero their gradients, and optimizers that step while these are made: a dropped step leaves both as it found them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from test_after_a_skip import Batch, is_as_never_drawn, normed
from torch import nn

import whynan


def decaying(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
    for _, x, y in drawn:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.9)
        (model(x) - y).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("bad", [(0,), (5,), (3, 4)])
def test_gradients_that_a_loop_lets_decay_go_on_as_they_were(bad: tuple[int, ...]) -> None:
    """The next backward pass adds to what the bad one has found, not to nothing."""
    assert is_as_never_drawn(decaying, bad) == [(step, "WN701", "skipped") for step in bad]


def stepped_in_hooks(bad: Iterable[int], without: bool) -> list[Any]:
    """Train with one optimizer and scheduler for each weight, stepped while the gradients are made."""
    torch.manual_seed(0)
    model = normed()
    optimizers = {weight: torch.optim.Adam([weight], 0.01) for weight in model.parameters()}
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers.values()]

    def step(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    values = torch.Generator().manual_seed(1)
    with whynan.watch(model, *optimizers.values(), files=False):
        for number in range(8):
            x = torch.randn(8, 4, generator=values)
            if number in bad and without:
                continue
            model(x * float("nan") if number in bad else x).square().mean().backward()
            for scheduler in schedulers:
                scheduler.step()
    return torch.utils._pytree.tree_leaves([model.state_dict(), [s.state_dict() for s in schedulers], [o.state_dict() for o in optimizers.values()]])


@pytest.mark.parametrize("bad", [(7,), (2, 3)])
def test_every_optimizer_that_steps_in_a_hook_keeps_its_scheduler(bad: tuple[int, ...]) -> None:
    """All of them were left out, so no scheduler moves on."""
    skipped, never = stepped_in_hooks(bad, False), stepped_in_hooks(bad, True)
    assert len(skipped) == len(never)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(skipped, never, strict=True))
