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


LISTS = """
class Half(torch.optim.Optimizer):
    def __init__(self, params, eps=1e-12):
        super().__init__(params, dict(eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in weights]
            roots = torch._foreach_mul(gradients, gradients)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(weights, gradients, roots, value=-0.01)

net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).half()
opt = Half(net.parameters())
for step in range(3):
    loss = (net(torch.ones(2, 4).half()).float() * 1e-3).mean() if step == 1 else net(torch.ones(2, 4).half()).float().sum() * 30
"""


def test_of_lists_the_member_that_went_bad_is_shown(box: Sandbox) -> None:
    """`torch._foreach_addcdiv_` has three lists: the values shown are those of one weight, called by the lists' names in the source."""
    done = box.watched(HEAD + LISTS + TAIL)
    incident = next(i for i in done.incidents if i["cause"]["code"] == "WN604")
    shown = {value["name"].partition("[")[0]: value for value in incident["origin"]["inputs"]}
    assert list(shown) == ["weights", "gradients", "roots"]
    assert len({value["name"].partition("[")[2] for value in shown.values()}) == 1
    assert len({tuple(value["shape"]) for value in shown.values()}) == 1 and shown["roots"]["zeros"]
    assert incident["origin"]["output"] is not None


def test_an_update_by_lists_is_told_as_one_weight_by_weight(box: Sandbox) -> None:
    """torch's own optimizers update one weight at a time or all at once: what is shown is the same."""
    source = (
        HEAD.replace("net.parameters(), 0.01", "net.parameters(), 0.01, foreach=LISTS, eps=0.0").replace("SGD", "Adam").replace("net = nn.Linear(4, 1)", MIXED)
    )
    body = "for step in range(3):\n    loss = net(torch.ones(2, 4)).mean()\n"
    both = [box.watched(source.replace("LISTS", lists) + body + TAIL).incidents[0] for lists in ("False", "True")]
    assert [i["cause"]["code"] for i in both] == ["WN604", "WN604"]
    assert both[0]["origin"]["inputs"] == both[1]["origin"]["inputs"]
    assert [value["name"] for value in both[1]["origin"]["inputs"]] == ["1.weight", "numerator", "denominator"]


MIXED = """
class Net(nn.Sequential):
    def forward(self, x):
        return self[0](x) + self[1](torch.tensor([1]))
net = Net(nn.Linear(4, 1), nn.Embedding(3, 1))
"""
