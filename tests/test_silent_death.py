"""Every number is finite and nothing is learned: noticed within 50 steps, with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whynan
from whynan.records import Incident

STEPS = 80


def train(loss_of: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, **options: Any) -> list[Incident]:
    """Train under watch and return what was told."""
    with whynan.watch(model, optimizer, files=False, **options) as guard:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()
    return guard.incidents


def small(rate: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), rate)


def only(incidents: list[Incident]) -> Incident:
    assert [i.cause.code for i in incidents] == ["WN609"]
    return incidents[0]


def test_a_gradient_that_ends_in_a_clamp_is_told_with_its_line() -> None:
    """A saturated clamp: within 50 steps, at the line of the clamp, proven by the step without it."""
    model, optimizer = small()

    def loss_of(step: int) -> torch.Tensor:
        out = model(torch.randn(8, 4)) + (100 if step >= 10 else 0)
        return (out.clamp(-5, 5) - 1).square().mean()

    incident = only(train(loss_of, model, optimizer))
    assert incident.step - 10 < 50
    assert "clamp(-5, 5)" in incident.origin.span.code
    assert "since step 10" in incident.cause.evidence[0]
    assert incident.remedies[0].result == "proven"


def test_an_optimizer_for_another_copy_is_told() -> None:
    model, optimizer = small()
    other = nn.Linear(4, 1)

    def loss_of(step: int) -> torch.Tensor:
        other.zero_grad()
        return other(torch.randn(8, 4)).square().mean()

    incident = only(train(loss_of, model, optimizer))
    assert any("another copy of the model" in e for e in incident.cause.evidence)


def test_a_learning_rate_of_zero_is_told_with_its_first_step() -> None:
    model, optimizer = small()

    def loss_of(step: int) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 0.1 if step < 21 else 0.0
        return model(torch.randn(8, 4)).square().mean()

    incident = only(train(loss_of, model, optimizer))
    assert incident.step - 21 < 50
    assert "since step 21" in incident.cause.evidence[0]


@pytest.mark.parametrize("kind", ["rebound", "in place", "attribute"])
def test_a_running_value_that_became_nan_is_told_while_the_loss_is_finite(kind: str) -> None:
    """Rebound each step, written in place, or put on a module by its forward pass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.centre = nn.Linear(4, 1), torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "attribute":
                self.centre = 0.9 * self.centre + 0.1 * x.mean()
            return self.linear(x.nan_to_num())

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    centre = torch.zeros(())

    def loss_of(step: int) -> torch.Tensor:
        nonlocal centre
        x = torch.randn(8, 4)
        if step == 12:
            x[0, 0] = torch.nan
        if kind == "rebound":
            centre = 0.9 * centre + 0.1 * x.mean()
        elif kind == "in place":
            centre.mul_(0.9).add_(0.1 * x.mean())
        return (model(x) - torch.nan_to_num(centre)).square().mean()

    incident = only(train(loss_of, model, optimizer))
    assert incident.step - 12 < 50
    assert "has nan among its 1 values" in incident.cause.evidence[0]


def test_updates_that_round_away_in_half_precision_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-7)
    incident = only(train(lambda step: (model(torch.randn(8, 64).bfloat16()) - 1).square().mean(), model, optimizer))
    assert incident.step < 50 and "bfloat16" in incident.cause.evidence[1]
    moving = torch.optim.SGD(model.parameters(), 0.05)
    assert train(lambda step: (model(torch.randn(8, 64).bfloat16()) - 1).square().mean(), model, moving) == []


def test_a_program_that_leaves_every_step_is_told_and_not_slowed_down() -> None:
    """The reason is diagnosed three times, then only counted; that nothing is trained is said within 50 steps."""
    model, optimizer = small()
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(STEPS):
            loss = model(torch.randn(8, 4)).square().mean()
            if step >= 10:
                loss = loss / torch.zeros(())
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    codes = [i.cause.code for i in guard.incidents]
    assert codes == ["WN103"] * 3 + ["WN609"]
    assert guard.incidents[-1].step - 10 < 50


def test_the_policy_stop_is_for_damage_not_for_stillness() -> None:
    """A rate of 0 may be meant to rise again: it is told, and the run goes on."""
    model, optimizer = small()
    incident = only(train(lambda step: (model(torch.randn(8, 4)) * 0).sum() + 1, model, optimizer, policy="stop"))
    assert incident.action.taken == "observed"


def test_a_run_that_ends_while_it_stands_still_is_told_at_its_end() -> None:
    model, optimizer = small()
    incident = only(train(lambda step: (model(torch.randn(8, 4)) + 100).clamp(-5, 5).mean(), model, optimizer, steps=25))
    assert "clamp(-5, 5)" in incident.origin.span.code


def test_two_losses_on_one_graph_are_led_back_together() -> None:
    model, optimizer = small()
    with whynan.watch(model, optimizer, files=False) as guard:
        for _ in range(STEPS):
            out = (model(torch.randn(8, 4)) + 100).clamp(-5, 5)
            optimizer.zero_grad()
            out.mean().backward(retain_graph=True)
            out.square().mean().backward()
            optimizer.step()
    assert "clamp(-5, 5)" in only(guard.incidents).origin.span.code


@pytest.mark.parametrize("case", ["hinge", "frozen", "lbfgs", "missing data", "two optimizers", "labels", "table", "group at rest"])
def test_healthy_stillness_is_no_incident(case: str) -> None:
    """A satisfied hinge, frozen weights, a converged L-BFGS, masked missing values, half of a GAN, labels and tables with gaps, a group at rest."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1.0)
    if case == "frozen":
        model.requires_grad_(False)
        head = nn.Linear(1, 1)
        optimizer.add_param_group({"params": list(head.parameters())})
        told = train(lambda step: head(model(torch.randn(8, 4))).square().mean(), model, optimizer)
    elif case == "hinge":
        told = train(lambda step: (0.1 - model(torch.ones(8, 4))).clamp_min(0).mean(), model, optimizer)
    elif case == "missing data":

        def masked(step: int) -> torch.Tensor:
            x = torch.randn(8, 4)
            x[x > 1.5] = torch.nan
            return 0.1 * (model(x.nan_to_num()) - 1).square().mean()

        told = train(masked, model, torch.optim.SGD(model.parameters(), 0.01))
    elif case == "labels":
        with whynan.watch(model, optimizer, files=False) as guard:
            y = torch.randn(8, 1)
            y[2] = torch.nan  # made after the optimizer, never written again
            for _ in range(STEPS):
                out = model(torch.randn(8, 4))
                known = ~y.isnan()
                optimizer.zero_grad()
                (0.01 * (out[known] - y[known]).square().mean()).backward()
                optimizer.step()
        told = guard.incidents
    elif case == "table":
        means = torch.full((200,), torch.nan)

        def seen(step: int) -> torch.Tensor:
            nonlocal means
            out = model(torch.randn(8, 4))
            means = means.clone()
            means[step] = out.detach().mean()
            return 0.01 * (out - means.nanmean()).square().mean() + 0.01 * out.square().mean()

        told = train(seen, model, optimizer)
    elif case == "group at rest":
        model = nn.Linear(4, 1).bfloat16()
        head = nn.Linear(1, 1)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.0}, {"params": head.parameters(), "lr": 0.01}], 0.1)
        told = train(lambda step: (head(model(torch.randn(8, 4).bfloat16()).float()) - 1).square().mean(), model, optimizer)
    elif case == "two optimizers":
        other = nn.Linear(4, 1)
        second = torch.optim.SGD(other.parameters(), 0.1)
        with whynan.watch(model, optimizer, second, files=False) as guard:
            for step in range(STEPS):
                part, own = (model, optimizer) if step % 40 < 30 else (other, second)
                own.zero_grad()
                (part(torch.randn(8, 4)) - 1).square().mean().mul(0.1).backward()
                own.step()
        told = guard.incidents
    else:
        x = torch.randn(8, 4)
        y = x.sum(1, keepdim=True)
        solver = torch.optim.LBFGS(model.parameters())
        with whynan.watch(model, solver, files=False) as guard:
            for _ in range(STEPS):

                def closure() -> torch.Tensor:
                    solver.zero_grad()
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                    return loss

                solver.step(closure)
        told = guard.incidents
    assert told == []
