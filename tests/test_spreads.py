"""A denominator that is a spread, however it is written: by its formula, by sums of squares, in a product, under a root, in windows."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Sandbox

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Linear(6, {width})
opt = torch.optim.SGD(net.parameters(), 0.01)

def score(a, b):
{body}

for step in range(5):
    x = torch.randn(16, 6)
    y = x[:, :{width}] * 0.3
    if step == 3:
        {bad}
    loss = 1 - score(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
CONSTANT = "y = torch.full((16, 1), 0.25)"
SPREADS = {
    "sums of squares": (
        """
        n = a.numel()
        above = n * (a * b).sum() - a.sum() * b.sum()
        return above / torch.sqrt((n * (a * a).sum() - a.sum() ** 2) * (n * (b * b).sum() - b.sum() ** 2))""",
        CONSTANT,
        1,
    ),
    "means of squares": (
        """
        spread = [((t**2).mean() - t.mean() ** 2).sqrt() for t in (a, b)]
        return ((a * b).mean() - a.mean() * b.mean()) / (spread[0] * spread[1])""",
        CONSTANT,
        1,
    ),
    "a sum twice": (
        """
        n, s = b.numel(), b.sum()
        return -F.mse_loss(a, (b - s / n) / torch.sqrt(((b * b).sum() - s * s / n) / (n - 1)))""",
        CONSTANT,
        1,
    ),
    "a share of the sum of squares": ("        return ((b - a) ** 2).sum() / ((b**2).sum() - b.sum() ** 2 / b.numel())", CONSTANT, 1),
    "a scalar product with itself": (
        """
        c = (b - b.mean())[:, 0]
        return -F.mse_loss(a[:, 0], c / (torch.dot(c, c) / (len(c) - 1)).sqrt())""",
        CONSTANT,
        1,
    ),
    "the largest deviation": (
        """
        c, d = a - a.mean(), b - (0.5 * b.mean() + 0.5 * b.mean())
        return (c * d).mean() / (c.abs().max() * torch.maximum(torch.zeros(()), d.abs().max()))""",
        CONSTANT,
        1,
    ),
    "a covariance matrix": (
        """
        c = torch.cov(torch.cat([a, b], 1).T)
        return c[0, 1] / (c[0, 0] * c[1, 1]).sqrt()""",
        CONSTANT,
        1,
    ),
    "a sum over indices": (
        """
        c, d = (t - t.mean(1, keepdim=True) for t in (a, b))
        below = torch.einsum("ij,ij->i", c, c) * torch.einsum("ij,ij->i", d, d)
        return (torch.einsum("ij,ij->i", c, d) / below.sqrt()).mean()""",
        "y[7] = 0.5",
        4,
    ),
    "windows of an image": (
        """
        a, b, ones = a.view(-1, 1, 2, 2), b.view(-1, 1, 2, 2), torch.ones(1, 1, 2, 2)
        mean = [F.conv2d(t, ones) for t in (a, b)]
        cross = F.conv2d(a * b, ones) - mean[0] * mean[1] / 4
        spread = [F.conv2d(t * t, ones) - m * m / 4 for t, m in zip((a, b), mean)]
        below = spread[0] * spread[1]
        return (cross * cross / below).mean()""",
        "y[7] = 0.5",
        4,
    ),
}


def said(box: Sandbox, body: str, bad: str, width: int) -> dict[str, Any]:
    """What is said of the third step of a program."""
    lines = "\n".join(line[4:] for line in body.strip("\n").splitlines())
    incident: dict[str, Any] = box.watched(PROGRAM.format(body=lines, bad=bad, width=width)).incidents[0]
    assert incident["step"] == 3
    return incident


@pytest.mark.parametrize(("body", "bad", "width"), SPREADS.values(), ids=list(SPREADS))
def test_a_spread_of_constant_values_is_one_however_it_is_written(body: str, bad: str, width: int, box: Sandbox) -> None:
    """A correlation, a score or a normalisation of constant data is WN404, and a change is proven."""
    incident = said(box, body, bad, width)
    assert (incident["cause"]["code"], incident["remedies"][0]["result"]) == ("WN404", "proven")


OTHERS = {
    "a length beside a spread": ("        return (a * b).sum() / (a.std() * b.norm())", "y = y * 0", 1),
    "squares less a product with one of them": ("        return (a * b).sum() / ((b * b).sum() - b[0] * b.sum())", "y = y * 0", 1),
    "squares less a sum": ("        return (a * b).mean() / ((b * b).sum() - b.sum())", "y = (y > 0).float()", 1),
    "distances to another": ("        return (a * b).sum() / ((b - x[:, :1]) ** 2).sum()", "y = x[:, :1].clone(); y[:8] = 0; x[:8] = 0", 1),
    "what cancelled": (
        """
        b = b + (4096 if step == 3 else 0)
        return (a * b).mean() / ((b * b).mean() - b.mean() ** 2).clamp_min(0)""",
        "y = torch.tensor([0.0, 2**-7]).repeat(8)[:, None]",
        1,
    ),
}


@pytest.mark.parametrize(("body", "bad", "width"), OTHERS.values(), ids=list(OTHERS))
def test_what_is_0_for_another_reason_is_no_spread_of_identical_values(body: str, bad: str, width: int, box: Sandbox) -> None:
    """The length of a vector of zeros, a difference that is no variance, a variance of values that differ."""
    assert said(box, body, bad, width)["cause"]["code"] in ("WN103", "WN104")


def test_the_windows_that_are_constant_are_counted(box: Sandbox) -> None:
    """A filter's groups are its windows, not rows."""
    incident = said(box, *SPREADS["windows of an image"])
    assert [span["label"] for span in incident["origin"]["from"]] == ["the variance: 1 of 16 windows is constant"]
