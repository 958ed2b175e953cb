"""What a loop exchanges for the time of a call (weights for `functional_call`, a switch), and gradients it makes without a backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import whynan

Forward = Callable[[nn.Module, dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


def fast_weights(net: nn.Module, teacher: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One step of a learner inside the step."""
    weights = dict(net.named_parameters())
    slopes = torch.autograd.grad(functional_call(net, weights, (x,)).square().mean(), list(weights.values()), create_graph=True)
    return functional_call(net, {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}, (x,))


def scaled_weights(net: nn.Module, teacher: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Weights computed for one call."""
    return functional_call(net, {k: w * 1.0 for k, w in net.named_parameters()}, (x,))


def teacher_first(net: nn.Module, teacher: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A teacher's weights and statistics in the student, before the student's own call."""
    with torch.no_grad():
        aim = functional_call(net, teacher, (x,))
    return net(x) - aim


def teacher_last(net: nn.Module, teacher: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The same after it, and as parameters."""
    out = net(x)
    with torch.no_grad():
        aim = functional_call(net, {k: nn.Parameter(v) if "num" not in k else v for k, v in teacher.items()}, (x,))
    return out - aim


def other_parameter(net: nn.Module, teacher: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A parameter put in place by hand for one call."""
    first: Any = net[0]  # type: ignore[index]
    own, first.weight = first.weight, nn.Parameter(first.weight.detach() * 2)
    aim = net(x).detach()
    first.weight = own
    return net(x) - aim


def switched_off(net: nn.Module, teacher: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A switch that is off for the reference, as of adapters."""
    first: Any = net[0]  # type: ignore[index]
    first.on = False
    aim = net(x).detach()
    first.on = True
    return net(x) - aim


class Adapted(nn.Linear):
    """A layer with a part that can be switched off."""

    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if self.on else 1.0)


def batches(bad: int | None) -> list[torch.Tensor]:
    """Eight batches, and perhaps one without any spread between them."""
    made = [torch.randn(16, 4, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    return made if bad is None else [*made[:bad], torch.ones(16, 4), *made[bad:]]


def exchanging(forward: Forward, bad: int | None) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """Train; the loss divides by the spread of the batch. Also returns the parameters and buffers that the model was made with."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    own = [*net.parameters(), *net.buffers()]
    teacher = {k: v.clone() for k, v in net.state_dict().items()}
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for x in batches(bad):
        optimizer.zero_grad()
        (forward(net, teacher, x).square().sum(-1).mean() / x.var(0).sum()).backward()
        optimizer.step()
    return net, optimizer, own


def state(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that outlives a step."""
    return [*net.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("bad", [0, 1, 5, 7])
@pytest.mark.parametrize("forward", [fast_weights, scaled_weights, teacher_first, teacher_last, other_parameter, switched_off])
def test_what_stood_in_a_module_for_one_call_is_not_put_back_into_it(forward: Forward, bad: int) -> None:
    """The state is that of a run without the bad batch, and the module has its own parameters, buffers and switches."""
    expected, optimizer, _ = exchanging(forward, None)
    with whynan.watch(files=False) as guard:
        net, watched, own = exchanging(forward, bad)
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(bad, "skipped")]
    assert same(state(expected, optimizer), state(net, watched))
    assert all(a is b for a, b in zip((*net.parameters(), *net.buffers()), own, strict=True))
    assert net[0].on  # type: ignore[index]


def assigned(p: torch.Tensor, g: torch.Tensor) -> None:
    """A new gradient."""
    p.grad = g


def copied(p: torch.Tensor, g: torch.Tensor) -> None:
    """Into the old one."""
    p.grad = g if p.grad is None else p.grad.copy_(g)


def zeroed_and_added(p: torch.Tensor, g: torch.Tensor) -> None:
    """To the old one, zeroed."""
    p.grad = g if p.grad is None else p.grad.zero_().add_(g)


def as_data(p: torch.Tensor, g: torch.Tensor) -> None:
    """As the memory of the old one."""
    if p.grad is None:
        p.grad = g
    else:
        p.grad.data = g


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("put", [assigned, copied, zeroed_and_added, as_data])
def test_gradients_made_without_a_backward_pass_after_a_dropped_step_are_new_ones(put: Callable[..., None], several: bool) -> None:
    """Only the bad step is dropped: nothing but the gradients themselves tells that the steps after it are others."""

    def run(bad: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        groups = [net[0].parameters(), net[2].parameters()] if several else [net.parameters()]
        optimizers = [torch.optim.Adam(group, lr=1e-2) for group in groups]
        for x in batches(bad):
            weights = list(net.parameters())
            for p, g in zip(weights, torch.autograd.grad(net(x).square().sum(-1).mean() / x.var(0).sum(), weights), strict=True):
                put(p, g)
            for optimizer in optimizers:
                optimizer.step()
        return [t for optimizer in optimizers for t in state(net, optimizer)]

    expected = copy.deepcopy(run(None))
    with whynan.watch(files=False) as guard:
        found = run(3)
    assert [i.action.taken for i in guard.incidents] == ["skipped"]
    assert same(expected, found)
