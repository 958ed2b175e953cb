"""On a GPU a scout runs before the tracer, so that a step is not waited for at each operation: the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import whynan
from whynan.records import Incident
from whynan.trace import locate, mending, scouting

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def spread(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss is infinite when all values are the same."""
    return model(x).square().mean() / x.var()


def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Only the gradient is bad: sqrt at 0."""
    y = model(x)
    return torch.sqrt((y - y.roll(1, 0)).square().sum(1)).mean()


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A row that is masked away as a whole; the infinities of the mask are meant."""
    scores = model(x) @ model(x).T
    return torch.softmax(scores.masked_fill(x[:, :1] > 0.999, -torch.inf), 1).square().sum()


def parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The damage is in one of two halves, and in one of several results of an operation."""
    left, right = model(x).split(2, 1)
    values, _ = torch.sort(torch.log((left - left.roll(1, 0)).square().sum(1)), dim=0)
    return values.mean() * 0.1 + right.square().mean() + F.layer_norm(right, (2,)).square().mean()


def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Float16 leaves its range."""
    return ((model(x) * 300).half() * (x[:, :4] * 300).half()).float().mean()


def unexplained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two infinities that cancel: there is no remedy to try, only the birth can be mended."""
    large = (model(x) * x[:, :4] * 1e16).square()
    return (large - large.roll(1, 0) * 2).mean()


def two(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two places, each bad enough alone."""
    y = model(x)
    return torch.log((y - y.roll(1, 0)).square().sum(1)).mean() + (y / (x - x.roll(1, 0)).norm(dim=1, keepdim=True)).mean()


def diagnosed(loss_of: Loss, bad: torch.Tensor) -> Incident:
    """Train three good steps and a bad one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(4):
            x = torch.randn(8, 6) * 0.1 if step < 3 else bad
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    assert guard.incidents
    return guard.incidents[0]


def told(incident: Incident) -> dict[str, Any]:
    """What is said, without the time."""
    return {**incident.to_json(), "time": ""}


@pytest.mark.parametrize(("loss_of", "bad"), [(spread, torch.ones(8, 6)), (slope, torch.ones(8, 6)), (masked, torch.ones(8, 6)),
                                              (parts, torch.ones(8, 6)), (half, torch.full((8, 6), 90.0)),
                                              (unexplained, torch.full((8, 6), 1e5)), (two, torch.ones(8, 6))])  # fmt: skip
def test_a_scout_changes_no_answer(loss_of: Loss, bad: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole incident is the same, and the tracer looks at few operations."""
    plain = diagnosed(loss_of, bad)
    sent: list[scouting.Scouted | None] = []
    monkeypatch.setattr(scouting, "waits", lambda program: True)
    monkeypatch.setattr(mending, "waits", lambda program: True)
    monkeypatch.setattr(locate, "scout", lambda program: sent.append(scouting.scout(program)) or sent[-1])
    scouted = diagnosed(loss_of, bad)
    assert told(scouted) == told(plain)
    assert sent[0] is not None
    assert len(sent[0].suspects) < sent[0].count / 3


def test_a_step_that_does_not_repeat_is_traced_without_a_scout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scout saw fewer operations than the tracer: everything is looked at."""
    plain = told(diagnosed(spread, torch.ones(8, 6)))
    monkeypatch.setattr(locate, "scout", lambda program: scouting.Scouted(3, frozenset(), frozenset(), frozenset()))
    assert told(diagnosed(spread, torch.ones(8, 6))) == plain


def test_a_scout_that_overlooked_the_damage_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many operations, and none suspicious, but the loss is bad."""
    plain = told(diagnosed(spread, torch.ones(8, 6)))
    real = scouting.scout

    def blind(program: Any) -> scouting.Scouted:
        seen = real(program)
        assert seen is not None
        return scouting.Scouted(seen.count, frozenset(), frozenset(), frozenset())

    monkeypatch.setattr(scouting, "waits", lambda program: True)
    monkeypatch.setattr(locate, "scout", blind)
    assert told(diagnosed(spread, torch.ones(8, 6))) == plain
