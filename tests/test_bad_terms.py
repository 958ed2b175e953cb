"""`bad_terms="drop"`: a step goes on without the bad terms of its loss, bit for bit as if they had not been added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whynan
from whynan.errors import UsageError


class Heads(nn.Module):
    """Four heads over one trunk; the loss is the sum of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

    def forward(self, x: torch.Tensor, spread: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        """Sum over the heads that are used."""
        total = torch.zeros(())
        hidden = self.drop(torch.tanh(self.trunk(x)))
        for index in used:
            value = (self.heads[index](hidden) / spread[index]).square().mean()
            total = total + value / 4
        return total


EVERY, GOOD = (0, 1, 2, 3), (0, 2)


def train(used: dict[int, tuple[int, ...]], micro: int = 1, clip: bool = False, **options: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Train eight steps; in step 4 heads 1 and 3 divide by zero. Return the incidents and the whole state."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with whynan.watch(model, optimizer, files=False, **options) as guard:
        for step in range(8):
            optimizer.zero_grad()
            for part in range(micro):
                spread = torch.ones(4)
                if step == 4 and part == 0:
                    spread[1] = spread[3] = 0
                model(torch.rand(8, 4), spread, used.get(step, EVERY) if part == 0 else EVERY).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    state = torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()])
    return guard.incidents, [value for value in state if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_the_state_is_that_of_a_run_that_never_added_the_bad_terms(micro: int, clip: bool) -> None:
    """Weights, moments and step counts; also with accumulated gradients and clipping."""
    incidents, dropped = train({}, micro, clip, bad_terms="drop")
    none, wanted = train({4: GOOD}, micro, clip)
    assert [i.action.taken for i in incidents] == ["terms dropped"] and none == []
    assert len(dropped) == len(wanted) and all(map(torch.equal, dropped, wanted))


def test_heads_that_failed_keep_weights_and_moments() -> None:
    """A head that only a bad term reaches has made one update less."""
    incidents, state = train({}, bad_terms="drop")
    steps = sorted(int(value) for value in state if value.dim() == 0)
    assert steps == [7] * 4 + [8] * 6
    assert [t.nonfinite for t in incidents[0].terms] == [0, 1, 0, 1]


def test_by_default_the_step_is_skipped() -> None:
    """Dropping terms changes results and is asked for."""
    incidents, _ = train({})
    assert [i.action.taken for i in incidents] == ["skipped"]


def test_a_loss_with_no_good_term_is_skipped() -> None:
    """Nothing is left to learn from."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
        for step in range(4):
            y = model(torch.rand(8, 4)) / (step != 2)
            a, b = y[:, 0].square().mean(), y[:, 1].square().mean()
            optimizer.zero_grad()
            (a + b).backward()
            optimizer.step()
    assert [i.action.taken for i in guard.incidents] == ["skipped"]


def test_a_gradient_that_is_bad_behind_a_finite_loss_is_skipped() -> None:
    """No term is known to be bad there; the step is left out as a whole."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
        for step in range(4):
            y = model(torch.rand(8, 4))
            a, b = y[:, 0].square().mean(), (y[:, 1] * (step != 2)).square().sum().sqrt()
            optimizer.zero_grad()
            (a + b).backward()
            optimizer.step()
    assert [i.action.taken for i in guard.incidents] == ["skipped"]


def test_another_word_is_refused() -> None:
    """With what it may be."""
    with pytest.raises(UsageError, match="bad_terms is skip or drop, not 'keep'"):
        whynan.watch(nn.Linear(1, 1), bad_terms="keep")
