"""An infinity multiplied by a mask on its own line: the mask is named only where leaving the infinity out there heals the step."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import first, sentences

BODIES = {
    "the infinity counts too": (
        """
for step in range(4):
    x = torch.randn(6, 4) * (900 if step == 2 else 1)
    mask = torch.ones(6, 6).tril()
    risk = net(x).abs()
    loss = (torch.exp(risk) * mask).sum(0).log().mean()
""",
        "WN201",
    ),
    "the infinity stands at the masked places only": (
        """
for step in range(4):
    x = torch.randn(6, 4)
    mask = torch.ones(6, 1)
    if step == 2:
        x[1] *= 9000
        mask[1] = 0
    risk = net(x).abs()
    loss = (torch.exp(risk) * mask).sum()
""",
        "WN302",
    ),
    "the same infinity goes on beside the mask": (
        """
for step in range(4):
    x = torch.randn(6, 4)
    mask = torch.ones(6, 1)
    if step == 2:
        x[1] *= 9000
        mask[1] = 0
    risk = net(x).abs()
    loss = ((grown := torch.exp(risk)) * mask).sum() + grown.mean()
""",
        "WN201",
    ),
    "a logarithm that counts as well": (
        """
for step in range(4):
    x = torch.randn(6, 4) * (9000 if step == 2 else 1)
    target = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])[:, None]
    out = net(x)
    loss = -(target * torch.sigmoid(out).log()).mean()
""",
        "WN101",
    ),
    "two sides of a cross-entropy, each 0 where its logarithm is infinite": (
        """
for step in range(4):
    x = torch.randn(6, 4) * (9000 if step == 2 else 1)
    p = torch.sigmoid(net(x))
    y = (p > 0.5).float()
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
""",
        "WN302",
    ),
}


@pytest.mark.parametrize(("body", "code"), BODIES.values(), ids=list(BODIES))
def test_the_mask_is_named_only_where_it_is_the_cause(body: str, code: str, box: Sandbox) -> None:
    """An infinity that also stands where the factor is not 0 is the fault of what made it."""
    incident = first(box, body)
    assert incident["cause"]["code"] == code, sentences(incident)
    assert "multiplying by 0 does not remove an infinity" in sentences(incident) or code != "WN302"


@pytest.mark.parametrize(
    ("taken_in", "name"), [("torch.atan({q})", "atan"), ("torch.tanh({q})", "tanh"), ("torch.sigmoid({q} + 0)", "sigmoid")], ids=["atan", "tanh", "sigmoid"]
)
def test_an_infinity_that_only_the_gradient_shows_is_told_as_that(taken_in: str, name: str, box: Sandbox) -> None:
    """The forward pass takes x / 0 in and the loss is finite: the text says so, and how a NaN comes of it on the way back."""
    body = f"""
net.weight.data.fill_(0.1)
for step in range(4):
    x, height = torch.rand(6, 4), torch.ones(6)
    if step == 2:
        height[2] = 0
    width = net(x).squeeze(1).abs() + 1
    loss = {taken_in.format(q="(width / height)")}.mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN103"
    assert f"is finite: {name} makes a finite value of the infinity; on the way back its slope there, 0, meets the infinite one" in sentences(incident)
