"""Small programs that go bad, for the tests of rules: a beginning, an end, and what is said of the first bad step."""

from __future__ import annotations

from typing import Any

from conftest import Sandbox

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
"""
TAIL = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def first(box: Sandbox, body: str, head: str = HEAD, **options: Any) -> dict[str, Any]:
    """Run a program that goes bad and return what is said of its first bad step."""
    incident: dict[str, Any] = box.watched(head + body + TAIL, **options).incidents[0]
    return incident


def sentences(incident: dict[str, Any]) -> str:
    """All that is said about the cause, in one text."""
    spans = [span["label"] for span in incident["origin"]["from"]]
    return "\n".join([incident["cause"]["label"], *incident["cause"]["evidence"], *spans])
