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


def test_a_training_that_has_come_to_a_loss_of_zero_is_not_told() -> None:
    """In bfloat16 the loss of a solved task rounds to 0 while tiny gradients still arrive."""
    torch.manual_seed(0)
    model = nn.Linear(64, 4).bfloat16()
    with torch.no_grad():
        model.weight[0] += 0.35
    x = torch.ones(8, 64).bfloat16()
    assert (
        train(lambda step: nn.functional.cross_entropy(model(x).float(), torch.zeros(8, dtype=torch.long)), model, torch.optim.SGD(model.parameters(), 1e-3))
        == []
    )


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


def words(rows: int, rate: float, steps: int = 120) -> list[Incident]:
    """Train an embedding in half precision of which each batch touches few rows."""
    torch.manual_seed(0)
    table = nn.Embedding(4001, 16, dtype=torch.bfloat16)

    def loss_of(step: int) -> torch.Tensor:
        left, right = table(torch.randint(1, rows, (16,))), table(torch.randint(1, rows, (16,)))
        return nn.functional.softplus(-(left * right).sum(-1).float()).mean()

    return train(loss_of, table, torch.optim.SGD(table.parameters(), rate), steps)


def test_rows_that_no_batch_touches_are_no_updates_that_round_away() -> None:
    """Few rows of a table in half precision are trained: those with a gradient are looked at, and they move."""
    assert words(200, 0.5) == []


def test_updates_of_rare_rows_that_round_away_are_told() -> None:
    incident = only(words(200, 1e-5))
    assert incident.step < 50 and "with the largest gradients" in incident.cause.evidence[1]


def test_one_weight_of_several_that_keeps_its_bits_is_no_standstill() -> None:
    """A scale that is too large for its updates, beside weights that move."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).bfloat16()
    scale = nn.Parameter(torch.full((16,), 4096.0, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.01)
    told = train(lambda step: ((model(torch.randn(8, 16).bfloat16()) * (scale / 4096)).float() - 1).square().mean(), model, optimizer, 120)
    assert told == []


@pytest.mark.parametrize("case", ["warm-up", "phases", "scheduled", "no loss of its own"])
def test_an_optimizer_that_rests_while_another_learns_is_no_standstill(case: str) -> None:
    """By a rate of 0 for a time, by a schedule, or because its part of the loss does not count yet."""
    torch.manual_seed(0)
    left, right = nn.Linear(4, 1), nn.Linear(4, 1)
    first, second = torch.optim.SGD(left.parameters(), 0.01), torch.optim.SGD(right.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda s: float((s // 40) % 2)) if case == "scheduled" else None
    with whynan.watch(left, first, second, files=False) as guard:
        for step in range(160):
            if case in ("warm-up", "phases"):
                first.param_groups[0]["lr"] = 0.01 * (step >= 60 if case == "warm-up" else step // 40 % 2)
            x = torch.randn(8, 4)
            share = float(case != "no loss of its own" or step >= 60)
            loss = (share * left(x) + right(x) - x.sum(1, keepdim=True)).square().mean()
            first.zero_grad()
            second.zero_grad()
            loss.backward()
            first.step()
            second.step()
            if schedule is not None:
                schedule.step()
    assert guard.incidents == []


def test_two_optimizers_at_rest_are_told_within_50_steps_of_theirs() -> None:
    torch.manual_seed(0)
    left, right = nn.Linear(4, 1), nn.Linear(4, 1)
    both = torch.optim.SGD(left.parameters(), 0.01), torch.optim.SGD(right.parameters(), 0.01)
    with whynan.watch(left, *both, files=False) as guard:
        for step in range(120):
            for optimizer in both:
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = 0.01 if step < 10 else 0.0
            (left(torch.randn(8, 4)) + right(torch.randn(8, 4)) - 1).square().mean().backward()
            for optimizer in both:
                optimizer.step()
    assert {i.cause.code for i in guard.incidents} == {"WN609"}
    assert guard.incidents[0].step // 2 - 10 < 50
    assert "since step 20" in guard.incidents[0].cause.evidence[0]


def test_one_of_two_optimizers_with_a_constant_loss_and_no_gradient_is_told() -> None:
    """A generator behind a saturated discriminator, while the other one learns on."""
    torch.manual_seed(0)
    left, right = nn.Linear(4, 1), nn.Linear(4, 1)
    first, second = torch.optim.SGD(left.parameters(), 0.01), torch.optim.SGD(right.parameters(), 0.01)
    with whynan.watch(left, first, second, files=False) as guard:
        for _ in range(STEPS):
            first.zero_grad()
            (left(torch.randn(8, 4)) + 100).clamp(-5, 5).mean().backward()
            first.step()
            second.zero_grad()
            (right(torch.randn(8, 4)) - 1).square().mean().backward()
            second.step()
    incident = only(guard.incidents)
    assert incident.step // 2 < 50
    assert "weight of this optimizer" in incident.cause.evidence[0] and "another optimizer learns on" in incident.cause.evidence


@pytest.mark.parametrize("kind", ["delay", "phases", "waves", "restarts", "cycles"])
def test_a_schedule_that_raises_its_rate_again_is_no_standstill(kind: str) -> None:
    """One optimizer, at 0 for a while: before a warm-up, in turns, in the lower half of a wave, between two cycles."""
    model, optimizer = small()
    of = {
        "delay": lambda s: min(1.0, max(0, s - 60) / 20),
        "phases": lambda s: float((s // 40) % 2),
        "waves": lambda s: max(0.0, torch.cos(torch.tensor(s / 16)).item()),
        "restarts": lambda s: max(0.0, 1 - (s % 80) / 40),
        "cycles": lambda s: float(s % 16 != 15),  # 0 whenever somebody looks
    }[kind]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, of)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(160):
            assert optimizer.param_groups[0]["lr"] == 0.1 * of(step)  # that somebody looked ahead is not seen
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - 1).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert guard.incidents == []


@pytest.mark.parametrize("kind", ["ended", "past its end", "never stepped"])
def test_a_schedule_that_stays_at_zero_is_told(kind: str) -> None:
    """It has come to its end and the loop goes on; or nobody steps it."""
    model, optimizer = small()
    schedules = torch.optim.lr_scheduler
    schedule = {
        "ended": lambda: schedules.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / 20)),
        "past its end": lambda: schedules.PolynomialLR(optimizer, 20),
        "never stepped": lambda: schedules.LambdaLR(optimizer, lambda s: s / 20),
    }[kind]()

    def loss_of(step: int) -> torch.Tensor:
        if step and kind != "never stepped":
            schedule.step()
        return (model(torch.randn(8, 4)) - 1).square().mean()

    incident = only(train(loss_of, model, optimizer))
    assert incident.step - (0 if kind == "never stepped" else 20) < 50
    assert any("it is not stepped" in e for e in incident.cause.evidence) == (kind == "never stepped")


@pytest.mark.parametrize("kind", ["filled", "sliced", "masked", "queue", "rebound", "by index"])
def test_a_table_in_which_nan_marks_what_is_not_known_is_no_running_value(kind: str) -> None:
    """Set back to NaN now and then, written anew item by item, read by functions that know of NaN."""
    model, optimizer = small(0.01)
    table = torch.zeros(64)

    def loss_of(step: int) -> torch.Tensor:
        nonlocal table
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        if step % 64 == 20:
            if kind == "filled":
                table.fill_(torch.nan)
            elif kind == "sliced":
                table[:] = torch.nan
            else:
                table = torch.full((64,), torch.nan)
        place = 0 if kind in ("filled", "masked") else step % 64  # most of it stays unknown
        if kind == "masked":
            table.masked_fill_(torch.arange(64) == place, loss.item())
        elif kind == "queue":
            table = torch.cat([table[1:], loss.detach()[None]])
        elif kind == "rebound":
            table = torch.where(torch.arange(64) == place, loss.detach(), table)
        else:
            table[place] = loss.detach()
        if kind == "by index":
            known = table[~table.isnan()]
            return loss / (known.mean() + 1)
        return loss / (torch.nan_to_num(table.nanmean(), nan=1.0) + 1)

    assert train(loss_of, model, optimizer, 120) == []


def test_marks_that_go_by_and_by_are_no_average() -> None:
    """Each item has its own average, NaN until it is seen: NaN that become finite again mark something."""
    model, optimizer = small(0.01)
    table = torch.zeros(256)

    def loss_of(step: int) -> torch.Tensor:
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        if step == 20:
            table.fill_(torch.nan)
        mean = 0.9 * table[step] + 0.1 * loss.detach()
        table[step] = torch.where(mean.isnan(), loss.detach(), mean)
        return loss / (table.nanmean() + 1)

    assert train(loss_of, model, optimizer, 120) == []


@pytest.mark.parametrize("kind", ["one item", "view", "copied", "lerp", "read by nanmean"])
def test_a_running_value_is_told_however_it_goes_into_its_next_value(kind: str) -> None:
    """By item, through a view, by a copy, in place; also where the loss reads it by a function that hides the NaN."""
    model, optimizer = small(0.01)
    centre = torch.zeros(4)

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(8, 4)
        new = x.mean(0) if step != 12 else x.mean(0) * torch.nan
        if kind == "one item":
            centre[2] = 0.9 * centre[2] + 0.1 * new[2]
        elif kind == "view":
            centre[1:3].mul_(0.9).add_(0.1 * new[1:3])
        elif kind == "copied":
            centre.copy_(0.9 * centre + 0.1 * new)
        elif kind == "lerp":
            centre.lerp_(new, 0.1)
        else:
            centre.mul_(0.9).add_(new, alpha=0.1)
        offset = centre.nanmean().nan_to_num() if kind == "read by nanmean" else torch.nan_to_num(centre).sum()
        return (model(x) - 1 - offset).square().mean()

    incident = only(train(loss_of, model, optimizer))
    assert incident.step - 12 < 50
    assert "has nan among its 4 values" in incident.cause.evidence[0]


@pytest.mark.parametrize("kind", ["a metric", "the sum of the losses"])
def test_a_running_value_that_nothing_is_trained_by_is_no_standstill(kind: str) -> None:
    """It is only printed: NaN for the rest of the run, and no concern of the training."""
    model, optimizer = small(0.01)
    running = torch.zeros(())

    def loss_of(step: int) -> torch.Tensor:
        nonlocal running
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        seen = loss.detach() * (torch.nan if step == 12 else 1.0)
        running = 0.9 * running + 0.1 * seen if kind == "a metric" else running + seen
        return loss

    assert train(loss_of, model, optimizer, 120) == []
