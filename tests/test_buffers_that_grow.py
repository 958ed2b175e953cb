"""Buffers that a forward pass makes or resizes: a dropped step leaves them as it found them, also where it was the first."""

from __future__ import annotations

import pytest
import torch
from test_after_a_skip import Batch, is_as_never_drawn
from torch import nn
from torch.ao import quantization


class Made(nn.Module):
    """Fills a buffer that is None at first, and puts another in its place or writes to it."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces, self.linear = replaces, nn.Linear(4, 1)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = x.detach().abs().mean(0)
        if self.mean is None:
            self.mean = torch.ones_like(new)
        if self.replaces:
            self.mean = 0.9 * self.mean + 0.1 * new
        else:
            self.mean.mul_(0.9).add_(new, alpha=0.1)
        return self.linear(x - self.mean)


class Quantized(nn.Module):
    """Learns one scale for each row of its weight, in buffers that the first call resizes, past their version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scales = quantization.FusedMovingAvgObsFakeQuantize(
            quantization.MovingAveragePerChannelMinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.scales(self.linear.weight), self.linear.bias).sum(1, keepdim=True)


def plain(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: list[Batch]) -> None:
    for _, x, y in drawn:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("bad", [(0,), (1,), (5, 6)])
@pytest.mark.parametrize("kind", ["replaced", "written", "quantized"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_buffer_that_a_forward_pass_has_made_is_put_back(kind: str, bad: tuple[int, ...]) -> None:
    """To None or to nothing where the first step was bad; else to what it was."""
    make = {"replaced": lambda: Made(True), "written": lambda: Made(False), "quantized": Quantized}[kind]
    told = is_as_never_drawn(plain, bad, make=lambda: nn.Sequential(make()))
    assert told == [(step, "WN701", "skipped") for step in bad]
