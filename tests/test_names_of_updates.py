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


@pytest.mark.parametrize(
    ("optimizer", "bad", "state"), [("Adam", 0, "second moment"), ("Adam", 2, "exp_avg_sq"), ("RMSprop", 2, "square_avg"), ("Adagrad", 2, "sum")]
)
def test_the_square_of_a_gradient_is_told_by_its_parts(optimizer: str, bad: int, state: str, box: Sandbox) -> None:
    """No value is called by its place among the arguments of torch's kernel."""
    done = box.watched(HEAD.replace("SGD", optimizer) + LARGE.format(bad=bad) + TAIL)
    incident = next(i for i in done.incidents if i["cause"]["code"] == "WN604")
    names = [value["name"] for value in incident["origin"]["inputs"]]
    assert set(names) <= {state, "second moment", "gradient"}, names
    assert names.count("gradient") == 1  # one tensor is shown once, though it stands there twice
    assert "the square of a gradient of 1e+24 is past the range of float32" in incident["cause"]["label"]
    assert incident["cause"]["title"].startswith("update that makes the optimizer's `") and incident["cause"]["title"].endswith("` infinite")
    assert any("these weights would not move again" in words for words in incident["cause"]["evidence"])
    assert incident["remedies"][0]["title"].startswith("bring loss and gradients into a range whose squares are finite")


def test_what_an_accumulator_holds_is_not_told_as_the_gradient(box: Sandbox) -> None:
    """The second moment was larger than the gradient whose square left the range; that the gradients had grown all along is said with their numbers."""
    done = box.watched(HEAD.replace("SGD", "Adam") + "for step in range(40):\n    loss = net(torch.ones(2, 4)).mean() * 10.0**step\n" + TAIL)
    incident = next(i for i in done.incidents if i["cause"]["code"] == "WN604")
    sizes = {value["name"]: value["max"] for value in incident["origin"]["inputs"]}
    assert sizes["exp_avg_sq"] > sizes["gradient"]
    assert f"the square of a gradient of {sizes['gradient']:.4g} is past" in incident["cause"]["label"]
    assert any(
        words.startswith("the gradient norm over the last ") and "the update is only where this ended" in words for words in incident["cause"]["evidence"]
    )
