"""The logarithm of a 0/1 tensor is a mask where it is added to scores, and a fault where it is summed up."""

from __future__ import annotations

import pytest
import torch

import whynan


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, lambda t: t.square().mean()])
def test_a_log_of_zeros_and_ones_that_is_summed_up_is_the_birth(reduce: object) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = torch.tensor([1.0, 0.0, 1.0])
    with whynan.watch(model, optimizer, files=False) as guard:
        loss = model(torch.ones(3, 2)).mean() + reduce(torch.log(kept))  # type: ignore[operator]
        loss.backward()
        optimizer.step()
    assert [(i.cause.code, i.origin.op.split(".")[1]) for i in guard.incidents] == [("WN101", "log")]


def test_a_log_of_zeros_and_ones_added_to_scores_is_no_incident() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        loss = torch.softmax(model(torch.ones(3, 2)) + torch.log(torch.tensor([1.0, 0.0, 1.0])), -1).square().sum()
        loss.backward()
        optimizer.step()
    assert guard.incidents == []
