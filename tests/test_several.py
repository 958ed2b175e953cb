"""Several causes in one step: the one named is the one whose removal alone makes the step finite; a second place is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Sandbox

from whynan.trace.mending import mend

LOOP = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(7):
    x = torch.rand(16, 4) + 0.1
    out = net(x)
"""


def first(box: Sandbox, body: str) -> dict[str, Any]:
    """The first incident of a loop whose step is `body`; the marked line of each place is found by its comment."""
    done = box.watched(HEAD + body + LOOP)
    assert "internal error" not in done.err
    return done.incidents[0]


def line_of(body: str, mark: str) -> int:
    """The number of the line with a mark."""
    return next(n for n, text in enumerate((HEAD + body).splitlines(), 1) if mark in text)


def test_a_birth_that_is_masked_away_is_not_the_cause(box: Sandbox) -> None:
    """log(0) comes first and is masked away; the root of a negative number later is what breaks the step, and is named."""
    body = """
    amount = torch.rand(16, 4)
    amount[2] = 0.0
    gap = torch.rand(16, 4) + 0.1
    if step == 5:
        gap[6, 1] = -0.5
    weight = torch.log(amount)  # masked
    penalty = torch.sqrt(gap)  # cause
    both = torch.where(amount > 0, weight * penalty, penalty)
    loss = (out * both).square().mean()
"""
    incident = first(box, body)
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["line"]) == (5, "WN105", line_of(body, "# cause"))
    assert incident["cause"]["confidence"] == "proven"
    assert any(f":{line_of(body, '# masked')} (WN101" in e for e in incident["cause"]["evidence"])


def test_handled_missing_values_are_not_the_cause(box: Sandbox) -> None:
    """Missing targets are masked as they should be; a division by zero in another row is named, not the targets."""
    body = """
    y = torch.rand(16, 4)
    y[3] = float("nan")
    scale = torch.rand(16, 1) + 0.5
    if step == 5:
        scale[8] = 0.0
    err = (out - y) / scale  # cause
    loss = torch.where(y.isnan(), torch.zeros_like(err), err).abs().mean()
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["origin"]["line"]) == ("WN103", line_of(body, "# cause"))
    assert incident["cause"]["confidence"] == "proven"


TWO = [
    (
        """
    t = torch.rand(16, 4) + 0.01
    z = torch.rand(16, 4)
    if step == 5:
        t[2], z[7] = 0.0, 0.0
    likelihood = (out.sigmoid() * torch.log(t)).mean()  # first
    direction = z / z.norm(dim=-1, keepdim=True)  # second
    loss = (out * direction).mean() - likelihood
""",
        "WN101",
        "WN104",
    ),
    (
        """
    counts, rate = torch.ones(16, 4), out.abs()
    if step == 5:
        counts[1, 1], rate = 0.0, rate * 1e4
    err = torch.log(counts) - rate  # first
    loss = err.square().mean() + torch.exp(rate).mean()  # second
""",
        "WN101",
        "WN201",
    ),
    (
        """
    batch = torch.rand(16, 4)
    if step == 5:
        batch[4, 2] = float("nan")
    guess = net(batch)  # first
    y = torch.rand(16, 4)
    if step == 5:
        y[9] = guess.detach()[9]
    loss = ((guess - y) ** 2).sum(1).sqrt().mean()  # second
""",
        "WN701",
        "WN501",
    ),
]


@pytest.mark.parametrize(("body", "code", "other"), TWO, ids=["branches of the loss", "in sequence", "sample and slope"])
def test_two_independent_births_are_both_told(box: Sandbox, body: str, code: str, other: str) -> None:
    """Where removing one alone does not help, the second place stands beside the first; proven where changes at both were tried together."""
    incident = first(box, body)
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["line"]) == (5, code, line_of(body, "# first"))
    both = incident["remedies"][0]
    assert incident["cause"]["confidence"] == ("proven" if both["result"] == "proven" and "and at line" in both["title"] else "suspected")
    assert line_of(body, "# second") in [s["line"] for s in incident["origin"]["from"] if other in s["label"]]
    told = [e for e in incident["cause"]["evidence"] if "a second place" in e]
    assert told and f":{line_of(body, '# second')} ({other}" in told[0] and "without both the step is finite" in told[0]
    assert len(incident["experiments"]) <= 14 + 8  # with the trials at both places at once


def test_the_epsilon_is_the_cause_and_the_dead_row_is_not(box: Sandbox) -> None:
    """A dead row meets an epsilon that is 0 in float16: a larger epsilon alone makes the step finite, so it is proven."""
    body = """
    dead = torch.ones(16, 1)
    if step == 5:
        dead[3] = 0.0
    h = (out * dead).half()
    h = h / (h.norm(dim=-1, keepdim=True) + 1e-8)  # cause
    loss = (h.float() @ h.float().t() - torch.eye(16)).square().mean()
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["origin"]["line"]) == ("WN204", line_of(body, "# cause"))
    assert incident["cause"]["confidence"] == "proven"
    assert incident["origin"]["samples"] == [3]


def test_a_bad_row_beside_a_good_view_is_still_seen(box: Sandbox) -> None:
    """Looking at a finite row of a tensor with a NaN elsewhere does not hide where that NaN came from."""
    body = """
    bad = torch.log(torch.where(torch.arange(16.0)[:, None] == (3 if step == 5 else 99), -1.0, 1.0) * out.abs())  # cause
    row = bad.detach()[9]
    loss = (bad - row).square().mean()
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["origin"]["line"]) == ("WN102", line_of(body, "# cause"))


def test_rows_of_a_slice_are_counted_in_the_batch(box: Sandbox) -> None:
    """A bad row of a data set is named by its place in the batch that was cut out of it."""
    source = """
import torch
from torch import nn
torch.manual_seed(0)
data = torch.rand(64, 4)
data[37, 1] = float("nan")
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(8):
    x = data[8 * step : 8 * step + 8]
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    incident = box.watched(source).incidents[0]
    assert (incident["cause"]["code"], incident["origin"]["code"]) == ("WN701", "loss = net(x).square().mean()")
    assert incident["origin"]["samples"] == [5]
    assert incident["origin"]["inputs"][0]["shape"] == [8, 4]
    assert incident["cause"]["confidence"] == "proven"


def test_mending_changes_only_what_is_not_finite() -> None:
    """Finite values stay; the others become a usual value, in a gradient 0."""
    values = torch.tensor([1.0, float("nan"), 3.0, 2.0, float("inf")])
    mend(values)
    assert values.tolist() == [1.0, 2.0, 3.0, 2.0, 2.0]
    gradient = torch.tensor([1.0, float("nan")])
    mend(gradient, gradient=True)
    assert gradient.tolist() == [1.0, 0.0]
    nothing = torch.tensor([float("inf")])
    mend(nothing)
    assert nothing.tolist() == [1.0]


def test_an_experiment_leaves_the_data_as_it_was(box: Sandbox) -> None:
    """Mending a bad input works on copies: the user's own tensor still holds its NaN afterwards."""
    done = box.watched(
        HEAD
        + """
    if step == 5:
        kept = torch.rand(16, 4)
        kept[3] = float("nan")
        x = kept
    loss = net(x).square().mean()
"""
        + LOOP
        + """
print(int(kept.isnan().sum()))
"""
    )
    assert done.out.split() == ["4"]
    assert done.incidents[0]["cause"]["code"] == "WN701"
