"""The numbers in an optimizer's groups: one that is 0 is named, wherever it is held, and changed where the optimizer is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whynan
from whynan.causes.held_settings import Setting, guards
from whynan.records import Incident


class Own(torch.optim.Optimizer):
    """Divides by what its settings keep above 0, in one of several ways."""

    def __init__(self, params: Any, how: str = "eps", eps: Any = 1e-12, epsilon: float = 1e-6, damping: Any = 1e-3) -> None:
        super().__init__(params, {"how": how, "eps": eps, "epsilon": epsilon, "damping": damping})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                square = weight.grad.square()
                if group["how"] == "second":
                    update = weight.grad / (square + group["eps"][1]).sqrt()
                elif group["how"] == "power":
                    update = weight.grad * (square + group["damping"]).pow_(-0.25)
                elif group["how"] == "epsilon":
                    update = weight.grad / (square.sqrt() + group["epsilon"])
                else:
                    update = weight.grad * square.add(group["eps"]).rsqrt_()
                weight.sub_(0.01 * update)


def told(make: Any) -> Incident:
    """Train a layer of which one input is always 0, and return what is said of the first step."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3, bias=False)
    with whynan.watch(net, files=False) as guard:
        optimizer = make(net.parameters())
        for _ in range(2):
            x = torch.randn(8, 4)
            x[:, 3] = 0
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    return guard.incidents[0]


@pytest.mark.parametrize(
    ("make", "label", "given"),
    [
        (lambda p: Own(p, "second", eps=(1e-9, 0.0)), "eps[1] is 0: the update divides by 0", "eps=(1e-9, 1e-12)"),
        (lambda p: Own(p, "power", "auto", damping=torch.tensor(0.0)), "damping is 0: the update raises 0 to the power -0.25", "damping=0.001"),
        (lambda p: Own(p, "epsilon", eps=None, epsilon=0.0), "epsilon is 0: the update divides by 0", "epsilon=1e-6"),
        (lambda p: Own(p, eps=0.0), "eps is 0: the update divides by the root of 0", "eps=1e-12"),
        (lambda p: torch.optim.Adafactor(p, eps=(0.0, 1e-3)), "eps[0] is 0: the update divides by the root of 0", "eps=(1e-8, 0.001)"),
    ],
    ids=["a tuple", "a power", "another name", "a number", "Adafactor"],
)  # fmt: skip
def test_a_guard_that_is_0_is_named_and_changed_where_the_optimizer_is_made(make: Any, label: str, given: str) -> None:
    """It may be a member of a tuple, a tensor, beside words and None; a power is divided by as a quotient is."""
    incident = told(make)
    remedy = incident.remedies[0]
    assert (incident.cause.code, incident.cause.label) == ("WN604", label)
    assert (remedy.title, remedy.result) == (f"give the optimizer {given}", "proven")
    assert given in remedy.diff


def test_of_several_guards_that_are_0_the_one_that_matters_is_named() -> None:
    """Each is tried alone."""
    incident = told(lambda p: Own(p, "epsilon", eps=0.0, epsilon=0.0))
    assert incident.cause.label == "epsilon is 0: the update divides by 0"
    assert "epsilon=1e-6" in incident.remedies[0].diff


def test_a_guard_given_by_its_place_is_changed_in_its_place() -> None:
    """A second one by name would raise."""
    incident = told(lambda p: Own(p, "second", (0.5, 0.0)))
    assert 'Own(p, "second", (0.5, 1e-12))' in incident.remedies[0].diff


def test_a_construction_that_is_elsewhere_is_not_written_to() -> None:
    """The line that is known is that of `watch`, or of a function that makes the optimizer: neither takes the setting."""
    net = torch.nn.Linear(1, 1)
    optimizer = Own(net.parameters(), eps=0.0)
    with whynan.watch(net, optimizer, files=False) as guard:
        net(torch.zeros(2, 1)).sum().backward()
        optimizer.step()
    assert (guard.incidents[0].remedies[0].result, guard.incidents[0].remedies[0].diff) == ("proven", "")


def test_an_update_that_raises_0_to_a_negative_power_without_any_guard() -> None:
    """The power is told; there is no setting to change."""
    incident = told(Bare)
    assert incident.cause.label == "the update raises 0 to the power -0.5: 3 of 12 bases are 0"


class Bare(torch.optim.Optimizer):
    """Has no setting that could guard it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight.sub_(0.01 * weight.grad * weight.grad.square().pow(-0.5))


def test_what_is_no_number_is_no_guard() -> None:
    """Words, switches, None and tensors of several are passed over."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Own([weight], eps=[None, "auto", True, 1e-8, torch.zeros(3)], epsilon=float("nan"), damping=torch.tensor([0.0]))
    found = {s.name: s.value for s in guards(optimizer) if s.value == s.value}
    assert found == {"eps[3]": 1e-8, "damping": 0.0}
    assert Setting("eps", 0, 0.0, (0.0, 1.0), 5).larger("float32") == [5.0, 1e-8]


@pytest.mark.parametrize("rate", [None, (1e-2, 1e-3), torch.tensor([1e-2, 1e-3]), "auto"], ids=["None", "a tuple", "a tensor", "a word"])
def test_a_rate_that_is_no_number_is_not_looked_at(rate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Optimizers that find their rate themselves hold None; loading their state switched the watching off."""
    net = torch.nn.Linear(4, 1)
    with whynan.watch(net, policy="rollback", lr_after_rollback=0.5, files=False) as guard:
        optimizer = Rated(net.parameters(), rate)
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(8, 4) / (step != 2)).square().mean().backward()
            optimizer.step()
    assert [i.action.taken for i in guard.incidents] == ["rolled back"]
    assert "internal error" not in capsys.readouterr().err


class Rated(torch.optim.Optimizer):
    """Has a rate of any kind and does not use it."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight.sub_(0.01 * weight.grad)
