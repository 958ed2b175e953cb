"""What an optimizer would have made of bad gradients: measured on a copy, and never a reason to stop watching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from conftest import Sandbox
from torch._subclasses.fake_tensor import FakeTensorMode

import whynan
from whynan.records import Incident


class SignSGD(torch.optim.Optimizer):
    """Steps of one size; how the sign of a bad value is taken makes the difference."""

    def __init__(self, params: Any, sign: Callable[[torch.Tensor], torch.Tensor] = torch.sign) -> None:
        super().__init__(params, {"lr": 0.25})
        self.sign = sign

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(self.sign(p.grad), alpha=-0.25)


class Wrapper(torch.optim.Optimizer):
    """One that forgets `super().__init__()`, as several published wrappers do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Bare(torch.optim.Optimizer):
    """The same with an update of its own."""

    def __init__(self, params: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": 0.1}], {}, {}  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


def losses(model: torch.nn.Module, bad: float) -> Iterator[torch.Tensor]:
    """Yield four losses; the gradient of the third is `bad` everywhere."""
    for step in range(4):
        out = model(torch.ones(8, 4)).mean()
        yield out * bad if step == 2 else out.square()


def train(make: Callable[[Any], torch.optim.Optimizer], bad: float, scaler: Any = None) -> tuple[Incident, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = make(model.parameters())
    with whynan.watch(model, optimizer, files=False) as guard:
        for loss in losses(model, bad):
            optimizer.zero_grad()
            (scaler.scale(loss) if scaler else loss).backward()
            scaler.step(optimizer) if scaler else optimizer.step()
            scaler.update() if scaler else None
    (incident,) = guard.incidents
    return incident, model


def update(incident: Incident) -> str:
    return next((e.answer for e in incident.experiments if e.question == "the update with these gradients"), "")


def test_a_fused_optimizer_under_a_scaler_is_tried_without_the_scaler_s_word() -> None:
    incident, _ = train(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), float("nan"), torch.amp.GradScaler("cpu", init_scale=2.0))
    assert update(incident) == "AdamW would make 5 of 5 weights non-finite"


@pytest.mark.parametrize("make", [lambda p: Wrapper(torch.optim.SGD(p, lr=0.01)), Bare], ids=["around another", "by itself"])
def test_an_optimizer_without_its_base_s_fields_is_watched_all_the_same(make: Callable[[Any], torch.optim.Optimizer], capsys: Any) -> None:
    _, model = train(make, float("nan"))
    assert all(p.isfinite().all() for p in model.parameters())
    assert "internal error" not in capsys.readouterr().err


def unsigned(grad: torch.Tensor) -> torch.Tensor:
    return torch.sign(torch.nan_to_num(grad, nan=0.0))


@pytest.mark.parametrize(("bad", "told"), [("nan", "do not move"), ("inf", "move by up to 0.25")])
def test_how_far_weights_with_a_bad_gradient_move_is_measured(bad: str, told: str) -> None:
    incident, _ = train(lambda p: SignSGD(p, unsigned), float(bad))
    assert update(incident) == f"SignSGD would leave all 5 weights finite, by accident: the 5 with a bad gradient {told}"
    assert update(incident) in incident.cause.evidence


@pytest.mark.parametrize("kind", [float, numpy.float64, torch.tensor])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_learning_rate_that_is_infinite_is_told_before_it_reaches_the_weights(optimizer: Any, kind: Any) -> None:
    """The schedule divides by 0 once: that update is taken back, and the run goes on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    steps = optimizer(model.parameters(), lr=0.01)
    with whynan.watch(model, steps, files=False) as guard:
        for step in range(6):
            steps.param_groups[0]["lr"] = kind(0.01 if step != 3 else float("inf"))
            before = model.weight.detach().clone()
            steps.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            steps.step()
            assert torch.equal(before, model.weight) == (step == 3)
    (incident,) = guard.incidents
    assert (incident.cause.code, incident.cause.label, incident.cause.confidence.value) == ("WN604", "the learning rate is inf", "proven")
    assert "the last learning rate that was finite is 0.01" in incident.cause.evidence


class Bounded(torch.optim.Optimizer):
    """Keeps the least value of each weight, a bound, and the least loss; at first all are infinite. Moments are kept in a type of one's own choice."""

    def __init__(self, params: Any, moments: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": 0.1})
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            held = self.state[p]
            if not held:
                held["least"], held["best"] = torch.full_like(p, torch.inf), torch.tensor(torch.inf)
                held["cap"] = torch.zeros_like(p).fill_(-torch.inf)
                held["square"] = torch.zeros_like(p, dtype=self.moments)
            held["least"][p > 0] = p[p > 0]
            held["square"].add_(p.grad.square())
            p.sub_(p.grad / (1 + held["square"]), alpha=0.1)
        return loss


def steps_of(optimizer: torch.optim.Optimizer, weight: torch.Tensor, sizes: list[float], closure: bool = False) -> None:
    """Make steps with gradients of these sizes."""
    for size in sizes:

        def back(size: float = size) -> torch.Tensor:
            weight.grad = None
            loss = (weight * size).sum()
            loss.backward()
            return loss

        if closure:
            optimizer.step(back)  # type: ignore[arg-type]
        else:
            back()
            optimizer.step()


@pytest.mark.parametrize("closure", [False, True])
def test_infinities_that_an_optimizer_keeps_on_purpose_are_no_damage(closure: bool) -> None:
    """State that is made infinite stays as it is meant, also in part, and after it is loaded: all updates are as without whynan."""
    ends = []
    for watch in (False, True):
        weight = torch.nn.Parameter(torch.tensor([[1.0, -1.0, 0.5]]))
        optimizer = Bounded([weight])
        with whynan.watch(optimizer, files=False) if watch else contextlib.nullcontext() as guard:
            steps_of(optimizer, weight, [1.0, -2.0], closure)
            optimizer.load_state_dict(optimizer.state_dict())
            steps_of(optimizer, weight, [3.0], closure)
        ends.append(weight.tolist())
        assert guard is None or guard.incidents == []
    assert ends[0] == ends[1]


def test_a_weight_that_is_infinite_before_an_update_is_not_broken_by_it() -> None:
    """A foreign optimizer that leaves an infinite weight infinite has made nothing worse."""
    weight = torch.nn.Parameter(torch.tensor([0.5, -torch.inf]))
    optimizer = Bounded([weight])
    with whynan.watch(optimizer, files=False) as guard:
        weight[:1].sum().backward()
        optimizer.step()
    assert guard.incidents == [] and weight[0] < 0.5


@pytest.mark.parametrize(("sizes", "step"), [([300.0, 1.0], 0), ([1.0, 300.0], 1)])
def test_a_moment_that_overflows_is_found_beside_infinities_that_are_meant(sizes: list[float], step: int) -> None:
    """A sum of squares that does not fit in float16 is no constant, be it infinite throughout and in the update that makes it."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 0.5]]))
    optimizer = Bounded([weight], torch.float16)
    with whynan.watch(optimizer, files=False) as guard:
        steps_of(optimizer, weight, sizes)
    assert [(i.step, i.cause.code) for i in guard.incidents] == [(step, "WN604")]


def test_a_backward_pass_under_fake_tensor_mode_belongs_to_no_step(capsys: Any) -> None:
    """Memory is estimated between the backward pass and the update: nothing is read there, and a bad step is still found."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.ones(4, 3)) / (step != 2)).mean().backward()
            with FakeTensorMode():
                torch.nn.Linear(3, 3)(torch.empty(2, 3)).sum().backward()
            optimizer.step()
    assert [i.step for i in guard.incidents] == [2]
    assert "internal error" not in capsys.readouterr().err


class Scaling(torch.optim.SGD):
    """Scales its gradients in place before the update, as LARS does in front of another optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                trust = 0.02 * weight.norm() / weight.grad.norm()  # the trust
                weight.grad.mul_(trust)
        return super().step(closure)


def test_an_update_that_scales_its_gradients_is_made_again_with_those_it_was_given() -> None:
    """They were replayed as it had left them, and told as a bad input of the step."""
    torch.manual_seed(0)
    model, idle = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    with whynan.watch(model, optimizer := Scaling([*model.parameters(), *idle.parameters()], 0.1), files=False) as guard:
        for step in range(5):
            optimizer.zero_grad()
            hidden = model(torch.randn(8, 4))
            (hidden.square().mean() + (step != 3) * idle(hidden).square().mean()).backward()
            optimizer.step()
    (incident,) = guard.incidents
    assert (incident.step, incident.cause.code, incident.action.taken) == (3, "WN604", "skipped")
    assert incident.origin.span.code.endswith("# the trust")


def test_gradients_whose_squares_are_infinite(box: Sandbox) -> None:
    """Finite gradients of 1e22: Adam's second moment is infinite, and those weights would never move again. The update is taken back."""
    done = box.watched("""
import torch
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(6):
    loss = (net(torch.randn(8, 3)) * (1e22 if step == 3 else 1)).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(all(v.isfinite().all().item() for s in opt.state.values() for v in s.values()))
""")
    told = [(i["step"], i["cause"]["code"], i["origin"]["code"], i["action"]["taken"]) for i in done.incidents]
    assert told[-1] == (3, "WN604", "opt.step()", "skipped"), told  # beside the spike
    assert "is past the range of float32" in done.err and done.out == "True\n"
