"""Gradients that are written to after `clip_grad_norm_`, or made bad by it: the norm of clipping says nothing of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_after_a_skip import Batch, is_as_never_drawn, normed

import whynan
from whynan.engine import noticing

Write = Callable[[list[torch.Tensor], int], None]
BAD = 5


def clip(weights: Any, to: Any) -> None:
    torch.nn.utils.clip_grad_norm_(weights, to)  # by its full name: one that is imported is exchanged only in files that are looked through


def divided(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, 1.0)
    for weight in weights:
        weight.grad.div_(0.0 if step == BAD else 2.0)


def noised(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, 1.0)
    for weight in weights:
        weight.grad = weight.grad + (math.inf if step == BAD else 0.01)


def scaled_together(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, 1.0)
    torch._foreach_mul_([weight.grad for weight in weights], math.nan if step == BAD else 1.0)


def from_a_vector(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, 1.0)
    vector = torch.cat([weight.grad.flatten() for weight in weights]) * (math.nan if step == BAD else 1.0)
    for weight, part in zip(weights, vector.split([weight.numel() for weight in weights]), strict=True):
        weight.grad.data = part.view_as(weight)


def copied(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, 1.0)
    weights[0].grad.copy_(torch.full_like(weights[0], math.nan if step == BAD else 0.5))


def through_data(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, 1.0)
    for weight in weights:
        weight.grad.data.mul_(math.nan if step == BAD else 1.0)


def to_nan(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, math.nan if step == BAD else 1.0)


def to_a_tensor(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, torch.tensor(math.nan if step == BAD else 1.0))


def twice(weights: list[torch.Tensor], step: int) -> None:
    clip(weights, math.nan if step == BAD else 1.0)
    clip(weights, 1.0)


def loop_of(write: Write) -> Callable[..., None]:
    """Return a loop that does this to its gradients; its inputs are fine."""

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, drawn: Any) -> None:
        for step, x, y in drawn:
            (model(x.nan_to_num()) - y).square().mean().backward()
            write(list(model.parameters()), step)
            optimizer.step()
            optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("write", [divided, noised, scaled_together, from_a_vector, copied, through_data, to_nan, to_a_tensor, twice])
def test_gradients_that_turn_bad_after_clipping_are_seen(write: Write) -> None:
    """The step is told and left out, whatever wrote to them; the optimizer never takes them."""
    told = is_as_never_drawn(loop_of(write), bad=(BAD,))
    assert [(step, taken) for step, _, taken in told] == [(BAD, "skipped")]


@pytest.mark.parametrize("to", [1.0, math.inf, torch.tensor(1.0)])
def test_gradients_that_are_only_clipped_are_not_looked_at_again(to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm that clipping computes is the tripwire's for nothing."""
    looks: list[Batch] = []
    monkeypatch.setattr(noticing, "norm_of_gradients", lambda *_: looks.append(_))
    model = normed()
    optimizer = torch.optim.Adam(model.parameters())
    total = torch.zeros(())
    with whynan.watch(model, optimizer, files=False) as guard:
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            clip(model.parameters(), to)
            total += 1
            optimizer.step()
            optimizer.zero_grad()
    assert not guard.incidents
    assert not looks


def test_an_infinite_bound_of_clipping_does_not_keep_the_capsule_from_being_written(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Loops that clip only for the norm pass `inf`."""
    model = normed()
    optimizer = torch.optim.Adam(model.parameters())
    with whynan.watch(model, optimizer, run_dir=tmp_path / "run") as guard:
        for step in range(4):
            loss = model(torch.full((8, 4), math.nan if step == 2 else 1.0)).square().mean()
            loss.backward()
            clip(model.parameters(), math.nan if step == 3 else math.inf)
            optimizer.step()
            optimizer.zero_grad()
    assert [i.step for i in guard.incidents] == [2, 3]
    assert "no capsule was written" not in capsys.readouterr().err
    assert len(list((tmp_path / "run" / "capsules").iterdir())) == 2
