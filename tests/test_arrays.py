"""What numpy computes inside a model is told at numpy's own line; what it computed outside, at the line it warned of."""

from __future__ import annotations

import pytest
from conftest import Sandbox

HEAD = """
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
"""
LOOP = """
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(6):
    x = torch.rand(8, 4) + 0.5
    x = x * 0 + (s == 3) * {bad} + (s != 3) * x
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
INSIDE = {
    "1.0 / a.mean(0)": ("WN103", 0.0),
    "a / a": ("WN104", 0.0),
    "np.log(a)": ("WN101", 0.0),
    "np.log(a - 2)": ("WN102", 1.0),
    "np.sqrt(a - 2)": ("WN105", 1.0),
    "np.exp(a)": ("WN201", 200.0),
    "a ** 20 * 1e-3": ("WN203", 200.0),
    "np.arccos(a / 4)": ("WN107", 8.0),
    "np.power(a, -1.0)": ("WN106", 0.0),
}


@pytest.mark.parametrize("formula", INSIDE)
def test_a_line_of_numpy_inside_a_model_is_told_with_what_numpy_says_of_it(formula: str, box: Sandbox) -> None:
    code, bad = INSIDE[formula]
    lift = "a + 4" if formula in ("np.log(a - 2)", "np.sqrt(a - 2)") else "a"
    done = box.watched(
        f"""{HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
    def forward(self, x):
        a = x.numpy()
        a = {lift if bad != 1.0 else "a if (a == 1).all() else a + 4"}
        weight = {formula}  # here
        return self.fc(x) + self.fc(torch.from_numpy(weight * np.ones((8, 4), np.float32)))
net = Net()
{LOOP.format(bad=bad)}"""
    )
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (3, code), done.err
    assert incident["origin"]["code"].endswith("# here") and incident["origin"]["exact"]
    assert "RuntimeWarning" not in done.err.partition("error[")[2]  # the replays give no warnings of their own


def test_data_made_by_numpy_before_the_training_is_told_at_the_line_numpy_warned_of(box: Sandbox) -> None:
    """One column is constant; that the value comes from there was not followed, and is said."""
    (incident, *_) = box.watched(f"""{HEAD}
raw = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
raw[:, 2] = 1
data = torch.from_numpy((raw - raw.mean(0)) / raw.std(0))  # here
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(4):
    loss = net(data[:16]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    assert incident["cause"]["code"] == "WN701"
    assert incident["origin"]["code"].endswith("# here") and not incident["origin"]["exact"]


def test_of_several_lines_that_numpy_warned_of_none_is_taken(box: Sandbox) -> None:
    (incident, *_) = box.watched(f"""{HEAD}
np.log(np.zeros(2)) - np.log(np.zeros(2))
np.zeros(2) / np.zeros(2)
data = torch.full((8, 4), float("nan"))
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(4):
    loss = net(data).square().mean()  # here
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    assert incident["origin"]["code"].endswith("# here") and incident["cause"]["code"] == "WN701"


def test_a_norm_of_gradients_that_is_zero_is_a_division_by_zero_and_no_branch(box: Sandbox) -> None:
    """Clipping by hand: nothing goes back through it."""
    (incident,) = box.watched(f"""{HEAD}
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(6):
    x = torch.randn(8, 4)
    y = net(x).detach() if s == 3 else x.sum(1, keepdim=True)
    loss = (net(x) - y).abs().mean()
    opt.zero_grad()
    loss.backward()
    total = torch.sqrt(sum((p.grad ** 2).sum() for p in net.parameters()))
    for p in net.parameters():
        p.grad.mul_(1.0 / total)  # here
    opt.step()
""").incidents
    assert (incident["cause"]["code"], incident["origin"]["phase"]) == ("WN103", "optimizer")
    assert incident["origin"]["code"].endswith("# here")
