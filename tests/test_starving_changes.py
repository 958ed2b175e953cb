"""A change that makes a step finite by stopping the gradient of most elements there is no remedy: rule 5 of how a diagnosis reads."""

from __future__ import annotations

from conftest import Sandbox
from going_bad import first

SATURATED = """
net.weight.data.fill_(0.5)
for step in range(4):
    x = torch.randn(16, 4)
    if step == 2:
        x = (x.abs() + 0.1) * torch.tensor([{factor}] * 15 + [1.0])[:, None]
    loss = torch.exp(net(x)).pow(0.02).mean()
"""


def test_a_change_that_trains_one_row_of_sixteen_is_not_proven(box: Sandbox) -> None:
    """All but one element lose their gradient, which have one in the healthy steps: nothing is gained over leaving the step out."""
    incident = first(box, SATURATED.format(factor=9000.0))
    held = next(e for e in incident["experiments"] if "keep the exponent" in e["question"])
    assert "no gradient passes through 15 of 16 elements there: it trains next to nothing" in held["answer"]
    assert not any(r["result"] == "proven" for r in incident["remedies"] if "clamp" in r["diff"])
    assert incident["cause"]["confidence"] == "proven"


def test_an_element_that_gets_no_gradient_has_none_to_lose(box: Sandbox) -> None:
    """The slope of the arc tangent behind the clamp is 0 as well: what the clamp holds trains nothing, and so it is without it."""
    incident = first(box, SATURATED.format(factor=9000.0).replace(".pow(0.02)", ".atan()"))
    assert incident["remedies"][0]["result"] == "proven", incident["experiments"]
