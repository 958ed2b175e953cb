"""`observe` changes nothing: a run with a bad batch ends, bit for bit, as it ends without whynan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.func import functional_call

import whynan

Step = Callable[[torch.Tensor], torch.Tensor]
Program = tuple[list[nn.Parameter] | list[torch.Tensor], Step, Callable[[], list[torch.Tensor]]]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def given_buffers() -> Program:
    """Weights and buffers of the loop's own, given to `functional_call`."""
    net = _net()
    weights = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    return list(weights.values()), lambda x: functional_call(net, (weights, buffers), (x,)), lambda: [*weights.values(), *buffers.values()]


def two_sets_of_buffers() -> Program:
    """Two of them in turn: an ensemble."""
    net = _net()
    sets = [{k: v.clone() for k, v in net.named_buffers()} for _ in range(2)]
    weights = dict(net.named_parameters())

    def call(x: torch.Tensor) -> torch.Tensor:
        return sum((functional_call(net, (weights, buffers), (x,)) for buffers in sets), torch.zeros(1))

    return list(weights.values()), call, lambda: [*weights.values(), *net.buffers(), *sets[0].values(), *sets[1].values()]


class Rebinding(nn.Module):
    """Writes to tensors and lists it holds, and then puts others in their place; the loop holds the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen, self.rows = torch.zeros(4), [torch.zeros(1)]
        self.old: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, and note the means."""
        self.seen += x.detach().nan_to_num().mean(0)
        self.rows.append(self.seen.mean())
        self.old = [self.seen, *self.rows]
        self.seen, self.rows = self.seen.clone(), list(self.rows)
        out: torch.Tensor = self.layer(x)
        return out


def rebound() -> Program:
    """What such a module held before."""
    net = Rebinding()
    held: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = net(x)
        held.extend(net.old)
        return out

    return list(net.parameters()), call, lambda: [*net.parameters(), net.seen, *net.rows, *held]


def exchanged_buffer() -> Program:
    """The loop puts another buffer in place before each call, and keeps the old ones."""
    net = _net()
    held: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        norm = net[1]  # type: ignore[index]
        held.append(norm.running_mean)
        norm.running_mean = norm.running_mean.clone()
        out: torch.Tensor = net(x)
        return out

    return list(net.parameters()), call, lambda: [*net.parameters(), *net.buffers(), *held]


def _end(make: Callable[[], Program], watch: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    weights, call, state = make()
    optimizer = torch.optim.SGD(weights, 0.01)
    with watch():
        for step, x in enumerate(torch.randn(9, 16, 4)):
            if step in (4, 6):
                x[0] = float("nan")
            loss = call(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step not in (4, 6):
                optimizer.step()
    yield from (t.detach() for t in state())


@pytest.mark.parametrize("make", [given_buffers, two_sets_of_buffers, rebound, exchanged_buffer])
def test_observer_leaves_the_run_as_it_is(make: Callable[[], Program], capsys: pytest.CaptureFixture[str]) -> None:
    """What a replay loads is put back wherever it stands by then."""
    watched = list(_end(make, lambda: whynan.watch(files=False, policy="observe")))
    plain = list(_end(make, contextlib.nullcontext))
    assert len(watched) == len(plain)
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(watched, plain, strict=True))
    said = capsys.readouterr().err
    assert "error[WN" in said and "internal error" not in said
