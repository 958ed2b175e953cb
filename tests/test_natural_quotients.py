"""What the values say of 0 / 0: a limit of 1, a denominator that is 1 - 1, and a change that would only hide all of it."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import first, sentences

LIMITS = """
for s in range(12):
    x = torch.randn(40, 4)
    d = x.abs().sum(-1, keepdim=True) / 3
    e = d / 10
    other = x.abs().sum(-1, keepdim=True) / 3
    if s == 8:
        d[5], e[5], other[5] = 0, 0, 0
    loss = (net(x) * ({}) - 1).square().mean()
"""


@pytest.mark.parametrize("quotient", ["d.clamp(max=1.0) / d", "torch.minimum(d, torch.ones(1)) / d", "torch.sin(e) / e"])
def test_a_quotient_of_a_value_by_itself_is_1_at_zero(quotient: str, box: Sandbox) -> None:
    """Next to 0 numerator and denominator are the same: the limit is 1, and 0 would throw the weight of a sample away."""
    incident = first(box, LIMITS.format(quotient))
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"]) == ("WN104", "proven")
    assert "== 0, 1.0, " in remedy["diff"], remedy
    assert "the numerator is made of the denominator and is the same next to 0" in sentences(incident)


@pytest.mark.parametrize("quotient", ["d / d.square().sqrt().add(d).sub(d).mul(2)", "d.square() / d", "other / d"])
def test_a_quotient_that_is_not_1_beside_it_or_not_made_of_its_denominator_counts_as_zero(quotient: str, box: Sandbox) -> None:
    """Values that are the same by chance have no limit: counts of a class that is missing are 1 everywhere else, too."""
    incident = first(box, LIMITS.format(quotient))
    assert incident["cause"]["code"] == "WN104"
    assert "== 0, 1.0, " not in incident["remedies"][0]["diff"], incident["remedies"]


AVERAGE = """
decay = torch.tensor(1 - {off})
averages, shadow = [torch.zeros_like(p) for p in net.parameters()], torch.nn.Linear(4, 1).requires_grad_(False)
for s in range(12):
    x = torch.randn(8, 4)
    loss = (net(x) - 1).square().mean()
    if s > 4:
        with torch.no_grad():
            for a, p, q in zip(averages, net.parameters(), shadow.parameters()):
                a.mul_(decay).add_((1 - decay) * p)
                q.copy_(a / (1 - decay ** (s - 4)))
        loss = loss + (net(x) - shadow(x)).square().mean()
"""


def test_zero_for_all_of_a_result_that_no_healthy_step_knows_is_no_remedy(box: Sandbox) -> None:
    """A decay that rounds to 1 makes an average of zeros over 1 - 1: an average that is 0 for ever would only hide that."""
    incident = first(box, AVERAGE.format(off="2e-8"))
    words = sentences(incident)
    assert incident["cause"]["code"] == "WN104"
    assert all(r["result"] != "proven" for r in incident["remedies"]), incident["remedies"]
    assert "numerator and denominator are 0 in every element" in words and "is exactly 1 in float32" in words
    assert "it is a power of a number that is 1 itself" in words
    assert incident["remedies"][0]["title"].startswith("keep 1 - x as a number of its own")
    assert "it hides the fault: all 4 elements were bad, and all are 0 with it" in words


def test_zero_for_one_batch_of_a_place_that_healthy_steps_came_to_may_be_proven(box: Sandbox) -> None:
    """There it is known that only this batch is empty: a share of nothing in it counts as 0."""
    incident = first(
        box,
        """
for s in range(12):
    x = torch.randn(8, 4)
    size = x.abs() * (s != 8)
    loss = (net(x * size / size.sum(-1, keepdim=True)) - 1).square().mean()
""",
    )
    assert incident["remedies"][0]["result"] == "proven", incident["remedies"]


def test_an_exponential_that_rounds_to_1_is_told_with_what_it_is_off(box: Sandbox) -> None:
    """1 - exp(-t) is 0 for a t that is not: what is lost is said in numbers."""
    incident = first(
        box,
        """
for s in range(12):
    x = torch.randn(8, 4)
    t = torch.rand(8, 1) + 0.5
    if s == 8:
        t[3] = 1e-9
    loss = (net(x) * t / (1 - torch.exp(-t)) - 1).square().mean()
""",
    )
    assert incident["cause"]["code"] == "WN103"
    assert "in float64 the same exp is off 1 by 1e-09" in sentences(incident), sentences(incident)
