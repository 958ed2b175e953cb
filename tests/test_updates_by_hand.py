"""Programs without `torch.optim`: an update that breaks a weight is found where it is written, and taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Sandbox
from torch.nn import functional

import whynan
from whynan.capsule.read import read
from whynan.capsules import find, replay

STEPS, BAD = 6, 3
Update = Callable[[torch.Tensor, torch.Tensor], None]


def under_no_grad(p: torch.Tensor, square: torch.Tensor) -> None:
    with torch.no_grad():
        square.mul_(0.5).addcmul_(p.grad, p.grad)  # type: ignore[arg-type]
        p -= 0.1 * p.grad / square.sqrt()  # the update


def through_data(p: torch.Tensor, square: torch.Tensor) -> None:
    square.mul_(0.5).add_(p.grad**2)  # type: ignore[operator]
    p.data.sub_(0.1 * p.grad / square.sqrt())  # the update


def into_data(p: torch.Tensor, square: torch.Tensor) -> None:
    square.mul_(0.5).add_(p.grad**2)  # type: ignore[operator]
    p.data = p.data - 0.1 * p.grad / square.sqrt()  # the update


def train(update: Update, module: bool, seen: Callable[[int, list[torch.Tensor]], None]) -> None:
    """Train a model or plain tensors; in one step the gradients of the first weight are 0, and so are their squares."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    first, bias = (net.weight, net.bias) if module else (torch.randn(2, 3, requires_grad=True), torch.zeros(2, requires_grad=True))
    squares = [torch.zeros_like(p) for p in (bias, first)]
    for step in range(STEPS):
        x = torch.randn(8, 3) if step != BAD else torch.zeros(8, 3)
        if step == BAD:
            squares[1].zero_()
        out = net(x) if module else functional.linear(x, first, bias)
        out.sub(1).square().mean().backward()
        seen(step, [bias, first, *squares])
        for p, square in zip((bias, first), squares, strict=True):
            update(p, square)
            p.grad = None


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("update", [under_no_grad, through_data, into_data])
def test_an_update_that_breaks_a_weight_is_found_where_it_is_written_and_taken_back(update: Update, module: bool) -> None:
    states: dict[int, list[torch.Tensor]] = {}
    with whynan.watch(files=False) as guard:
        train(update, module, lambda step, tensors: states.update({step: [t.detach().clone() for t in tensors]}))
    (incident,) = guard.incidents
    assert (incident.step, incident.cause.code, incident.origin.phase.value, incident.origin.exact) == (BAD, "WN104", "optimizer", True)
    assert incident.origin.span.code.endswith("# the update")
    assert incident.remedies[0].result == "proven"
    assert "the update is finite" in incident.remedies[0].effect
    assert all(torch.equal(before, after) for before, after in zip(states[BAD], states[BAD + 1], strict=True))  # weights and squares as before it
    assert not torch.equal(states[BAD + 1][0], states[BAD + 2][0])  # and the run goes on


def test_with_policy_observe_the_broken_weight_is_left_to_the_program() -> None:
    last: list[torch.Tensor] = []
    with whynan.watch(files=False, policy="observe") as guard:
        train(under_no_grad, False, lambda step, tensors: last.__setitem__(slice(None), tensors))
    assert (guard.incidents[0].step, guard.incidents[0].cause.code) == (BAD, "WN104")
    assert last[1].isnan().any()


def test_weights_that_are_made_anew_are_looked_at_while_it_is_known_how_they_were_made() -> None:
    """The style of functional libraries: nothing is written to, so nothing can be taken back."""
    torch.manual_seed(0)
    weight = torch.randn(4, requires_grad=True)
    with pytest.raises(whynan.TrainingStopped), whynan.watch(files=False) as guard:
        for step in range(STEPS):
            x = torch.randn(8, 4) if step != BAD else torch.zeros(8, 4)
            (grad,) = torch.autograd.grad((x @ weight - x.sum(1)).square().mean(), [weight])
            weight = (weight - 0.1 * grad / grad.norm()).detach().requires_grad_()  # the update
    first = guard.incidents[0]
    assert (first.step, first.cause.code, first.origin.phase.value) == (BAD, "WN104", "optimizer")
    assert first.origin.span.code.endswith("# the update")
    assert [i.cause.code for i in guard.incidents[1:]] == ["WN601"]


def test_a_capsule_of_such_a_step_replays_to_the_same_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with whynan.watch() as guard:
        train(under_no_grad, False, lambda step, tensors: None)
    (run,) = (tmp_path / "whynan-runs").iterdir()
    again = replay(read(find(run))).incident
    assert (again.cause.code, again.origin.span.line, again.origin.exact) == ("WN104", guard.incidents[0].origin.span.line, True)


def test_a_weight_that_holds_infinities_on_purpose_is_no_broken_one() -> None:
    scores = torch.tensor([0.5, -torch.inf, 0.25], requires_grad=True)
    with whynan.watch(files=False) as guard:
        for _ in range(STEPS):
            (torch.softmax(scores, 0) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
            with torch.no_grad():
                scores -= 0.1 * scores.grad  # type: ignore[operator]
            scores.grad = None
    assert not guard.incidents and scores.isneginf().sum() == 1


def test_healthy_updates_are_as_without_whynan() -> None:
    def final(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = torch.nn.Linear(3, 2)
        for _ in range(STEPS):
            functional.mse_loss(net(torch.randn(8, 3)), torch.ones(8, 2)).backward()
            for p in net.parameters():
                p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
                p.grad = None
        return [p.detach().clone() for p in net.parameters()]

    with whynan.watch(files=False) as guard:
        watched = final(True)
    assert not guard.incidents
    assert all(torch.equal(a, b) for a, b in zip(watched, final(False), strict=True))


def add_gradient(p: torch.Tensor, moment: torch.Tensor) -> None:
    moment.mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
    p.data.add_(moment, alpha=-0.01)


def add_square(p: torch.Tensor, moment: torch.Tensor) -> None:
    moment.mul_(0.9)
    moment.add_(0.1 * p.grad**2)  # type: ignore[operator]
    p.data.sub_(0.01 * p.grad / (1 + moment))


@pytest.mark.parametrize("update", [add_gradient, add_square])
def test_moments_updated_with_autograd_on_do_not_take_in_a_bad_step(update: Update) -> None:
    """Weights and moments end as in the run that never drew the bad batch; what the loop sums up beside them is its own."""
    ends = []
    for watch in (False, True):
        torch.manual_seed(0)
        net, seen = torch.nn.Linear(3, 2), torch.zeros(())
        moments = [torch.zeros_like(p) for p in net.parameters()]
        batches = [torch.randn(8, 3) for _ in range(STEPS)]
        with whynan.watch(files=False) if watch else contextlib.nullcontext() as guard:
            for step, x in enumerate(batches):
                if step == BAD and not watch:
                    continue
                net.zero_grad()
                (net(x) / (step != BAD)).square().mean().backward()
                for p, moment in zip(net.parameters(), moments, strict=True):
                    update(p, moment)
                seen.add_(1)
        ends.append([t.tolist() for t in (*net.parameters(), *moments)])
        assert guard is None or ([i.step for i in guard.incidents] == [BAD] and seen == STEPS)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("gradients", ["net.zero_grad(); loss.backward(); made = [p.grad for p in weights]", "made = torch.autograd.grad(loss, weights)"])
@pytest.mark.parametrize("first", [0, 2])
def test_running_statistics_of_a_step_without_optimizers(box: Sandbox, gradients: str, first: int) -> None:
    """A skipped step leaves buffers as before it, also where nobody knows when a step ends; the later ones are those of a run without the batch."""
    source = f"""
        import sys, torch
        from torch import nn

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        weights = list(net.parameters())
        for step in range(5):
            x = torch.randn(8, 4)
            if step == {first}:
                if "plain" in sys.argv[0]:
                    continue
                x[0] = float("nan")
            loss = net(x).square().mean()
            {gradients}
            with torch.no_grad():
                for weight, gradient in zip(weights, made):
                    weight -= 0.01 * gradient
            if step != {first}:
                print(step, loss.item(), [b.sum().item() for b in net.buffers()])
        print([p.sum().item() for p in weights])
    """
    assert box.watched(source).out == box.plain(box.write(source, "plain.py")).out


def test_weights_of_torch_func_are_told_at_the_arithmetic_that_broke_them(box: Sandbox) -> None:
    """They are plain tensors: what is done with the gradients after `grad` was once told a step late, as a weight that is bad."""
    done = box.watched("""
import torch
from torch.func import functional_call, grad, vmap
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
params = {k: v.detach() for k, v in net.named_parameters()}
def loss_of(params, x, y):
    return (functional_call(net, params, (x[None],)).squeeze() - y).square()
per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))
for s in range(6):
    x, y = torch.randn(8, 3), torch.randn(8)
    if s == 3:
        x[2], y[2] = 0, params["bias"]
    g = per_sample(params, x, y)
    size = sum(v.flatten(1).square().sum(1) for v in g.values()).sqrt()
    share = (1.0 / size).clamp(max=1e9)
    g = {k: (v.flatten(1) / size[:, None]).mean(0).view(params[k].shape) for k, v in g.items()}
    params = {k: v - 0.1 * g[k] for k, v in params.items()}
""")
    first = done.incidents[0]
    assert (first["step"], first["cause"]["code"], first["action"]["taken"]) == (3, "WN104", "observed")
    assert first["origin"]["code"].startswith("g = {k: (v.flatten(1) / size[:, None])")


def test_an_update_by_hand_with_an_infinite_step_size_is_told_as_that(box: Sandbox) -> None:
    (incident, *_) = box.watched("""
import torch
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
for s in range(8):
    net.zero_grad()
    net(torch.randn(8, 3)).sub(1).square().mean().backward()
    rate = 0.1 if s < 4 else float("inf")
    with torch.no_grad():
        for p in net.parameters():
            p -= rate * p.grad  # the update
""").incidents
    assert (incident["step"], incident["cause"]["code"]) == (4, "WN604")
    assert incident["origin"]["code"].endswith("# the update")
    assert incident["cause"]["evidence"] == ["weights and gradients are finite before the update"]


def test_the_norm_of_the_gradients_is_written_without_an_optimizer(box: Sandbox) -> None:
    """As for a program with one."""
    done = box.watched("""
        import torch
        w = torch.ones(3, requires_grad=True)
        for step in range(4):
            (w * torch.tensor([3.0, 4.0, 0.0])).sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
            w.grad = None
    """)
    assert [row["grad_norm"] for row in done.metrics] == [5.0] * 4
