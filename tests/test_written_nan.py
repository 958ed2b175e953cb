"""A NaN that the code writes itself, where a result should be, is told at the line that writes it; written into a batch, it is a bad input."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Sandbox

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
"""
LOOP = """
for step in range(5):
    x = torch.randn(16, 6)
    y = x[:, 0] * 0.3
    if step == 3:
        {bad}
    loss = 1 - score(net(x).squeeze(-1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
PLACEHOLDERS = {
    "filled, and written where there is a result": """
def score(a, b):
    out = torch.full((1,), float("nan"))  # here
    known = (b.var() > 1e-6)[None]
    out[known] = ((a * b).mean() / (b.var() + 1e-3))[None][known]
    return out.squeeze() + 0 * a.sum()
""",
    "filled like a result": """
def score(a, b):
    r = (a * b).mean()
    none = torch.full_like(r, float("nan"))  # here
    return r if b.var() > 1e-6 else none + 0 * r
""",
    "chosen": """
def score(a, b):
    return torch.where(b.var() > 1e-6, (a * b).mean(), float("nan"))  # here
""",
    "written into a part": """
def score(a, b):
    out = torch.zeros(2)
    out[0] = a.mean()
    if b.var() < 1e-6:
        out[1] = float("nan")  # here
    return out.sum()
""",
    "in a module": """
class Score(nn.Module):
    def forward(self, a, b):
        out = torch.full((2,), float("nan"))  # here
        out[0] = (a * b).mean()
        if b.var() > 1e-6:
            out[1] = 0
        return out.sum()
score = Score()
""",
}
DATA = {
    "a batch": ("x = torch.full((16, 6), float('nan'))", "WN701"),
    "a target": ("y = torch.full_like(y, float('nan'))", "WN702"),
    "a part of a target": ("y[3] = float('nan')", "WN702"),
    "an infinity in a batch": ("x[0, 0] = float('inf')", "WN701"),
    "an infinite sample": ("x = torch.cat([x[1:], torch.full((1, 6), float('-inf'))])", "WN701"),
    "an infinity in a target": ("y[3] = float('inf')", "WN702"),
}


def first(box: Sandbox, body: str, bad: str) -> dict[str, Any]:
    """What is said of the bad step."""
    incident: dict[str, Any] = box.watched(HEAD + body + LOOP.format(bad=bad)).incidents[0]
    assert incident["step"] == 3
    return incident


@pytest.mark.parametrize("body", PLACEHOLDERS.values(), ids=list(PLACEHOLDERS))
def test_a_nan_in_the_place_of_a_result_is_no_input(body: str, box: Sandbox) -> None:
    """It is told where it is written; neither the input nor the target, which are finite, is said to hold it."""
    incident = first(box, body, "y = torch.full((16,), 0.25)")
    here = next(number for number, line in enumerate((HEAD + body).splitlines(), 1) if line.endswith("# here"))
    assert (incident["origin"]["line"], incident["cause"]["label"]) == (here, "nan is written here")
    told = "\n".join([incident["cause"]["title"], *incident["cause"]["evidence"]])
    assert "input" not in told and "target" not in told


@pytest.mark.parametrize(("bad", "code"), DATA.values(), ids=list(DATA))
def test_a_batch_that_the_loop_itself_spoils_is_a_bad_input(bad: str, code: str, box: Sandbox) -> None:
    """Before the model has computed anything, what the loop makes is its data."""
    assert first(box, "def score(a, b):\n    return (a * b).mean()\n", bad)["cause"]["code"] == code


def test_an_infinity_is_a_mask_where_it_is_used_as_one(box: Sandbox) -> None:
    """Written into a tensor of the loop's, too: the row in which nothing is left is the cause."""
    body = "def score(a, b):\n    return (F.softmax(a[None] + b, -1) * a).sum()\n"
    assert first(box, body, "y = y.fill_(float('-inf'))")["cause"]["code"] == "WN401"


def test_a_second_place_that_only_writes_nan_is_told_as_that(box: Sandbox) -> None:
    """A metric that gives NaN for constant data: the 0 / 0 comes first, the line that writes the NaN beside it, and nothing is said of the target."""
    body = """
def score(a, b):
    spread = b.std()
    r = ((a - a.mean()) * (b - b.mean())).mean() / (a.std() * spread)
    out = torch.full_like(r, float("nan"))  # here
    known = spread > 1e-6
    out[known] = r[known]
    return out + 0 * a.sum()
"""
    incident = first(box, body, "y = torch.full((16,), 0.25)")
    assert incident["cause"]["code"] == "WN404"
    labels = [span["label"] for span in incident["origin"]["from"]]
    assert any("a second place: nan is written here" in label for label in labels), labels
    assert "target" not in "\n".join([*labels, *incident["cause"]["evidence"]])


def test_a_tensor_that_the_model_holds_is_called_by_its_name(box: Sandbox) -> None:
    """A bad constant of a module is not the input."""
    body = """
class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.full((16,), float("nan"))
    def forward(self, a, b):
        return (a * b).mean() if b.var() > 1e-6 else (a * self.table).mean()
score = Score()
"""
    assert first(box, body, "y = torch.full((16,), 0.25)")["cause"]["label"].startswith("`self.table` holds 16 non-finite values")
