"""Trained values that an update carries out of the domain of a function, and what is said of a root below 0."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import first, sentences

ORBIT = """
import torch
torch.manual_seed(0)
rho, size = torch.tensor(0.5, requires_grad=True), torch.tensor(1.0, requires_grad=True)
x = torch.randn(64)
opt = {optimizer}
for s in range(20):
    def closure():
        opt.zero_grad()
        spread = torch.sqrt(size * (1 - rho ** 2))
        loss = ((3 * rho - 4).square() + spread * x.square().mean() * 0.1) + (size - 1).square()
        loss.backward()
        return loss
    opt.step(closure)
"""


@pytest.mark.parametrize(
    ("optimizer", "advice"), [("torch.optim.SGD([rho, size], 0.05)", "smaller steps"), ("torch.optim.LBFGS([rho, size])", "line_search_fn='strong_wolfe'")]
)
def test_a_trained_value_that_left_the_domain_is_named_with_its_value(optimizer: str, advice: str, box: Sandbox) -> None:
    """The factor below 0 is made of `rho`, not of `size`; nothing cancels, so nothing is said of variances."""
    incident = box.watched(ORBIT.format(optimizer=optimizer)).incidents[0]
    words = sentences(incident)
    assert (incident["cause"]["code"], incident["origin"]["line"]) == ("WN105", 10)
    assert "it is made of a trained value: `rho` is " in words and "carried it out of the domain" in words, words
    titles = [r["title"] for r in incident["remedies"]]
    assert not any("subtract first" in t for t in titles), titles
    assert titles[0].startswith("write `rho` so that it cannot leave the domain") and titles[0].endswith(advice)
    assert ("met in evaluation " in words) == ("LBFGS" in optimizer)


def test_an_output_of_a_layer_is_no_trained_value(box: Sandbox) -> None:
    """What a layer computes lies outside for some inputs: no weight of it has left a domain."""
    incident = first(
        box,
        """
for s in range(12):
    x = torch.randn(8, 4)
    loss = (net(x).abs() + 0.1 - 10 * (s == 8)).sqrt().mean()
""",
    )
    assert incident["cause"]["code"] == "WN105"
    assert "trained value" not in sentences(incident)
    assert not any("subtract first" in r["title"] for r in incident["remedies"])
