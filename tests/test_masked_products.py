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
