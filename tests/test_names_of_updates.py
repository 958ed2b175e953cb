"""The values of an update that overflows are called what they are: a gradient, a second moment or a state by its name."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import HEAD, TAIL

LARGE = """
for step in range(4):
    factor = 1e24 if step == {bad} else 1.0
    loss = net(torch.ones(2, 4)).mean() * factor
"""


@pytest.mark.parametrize(("optimizer", "bad", "state"), [("Adam", 0, "second moment"), ("Adam", 2, "exp_avg_sq"), ("RMSprop", 2, "square_avg")])
def test_the_square_of_a_gradient_is_told_by_its_parts(optimizer: str, bad: int, state: str, box: Sandbox) -> None:
    """No value is called by its place among the arguments of torch's kernel."""
    done = box.watched(HEAD.replace("SGD", optimizer) + LARGE.format(bad=bad) + TAIL)
    incident = next(i for i in done.incidents if i["cause"]["code"] == "WN604")
    names = [value["name"] for value in incident["origin"]["inputs"]]
    assert set(names) <= {state, "second moment", "gradient"}, names
    assert "gradient" in names
