"""Complex numbers have no order: no rule compares them, and an element with two parts is counted once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whynan
from whynan.causes import verdict
from whynan.causes.catalogue import Finding, Rule, Scene, first_match, rules
from whynan.records import Incident


class Gain(nn.Module):
    """A filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3, dtype=torch.complex64) * 0.1 + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each band."""
        return x * self.gain


def first_incident(loss_of: Callable[[Tensor], Tensor], bad: complex) -> Incident:
    """Train for a few steps, the last with one bad entry, and return what is said of it."""
    torch.manual_seed(0)
    model = Gain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False, policy="skip") as guard:
        for step in range(4):
            x = torch.randn(6, 3, dtype=torch.complex64)
            if step == 3:
                x[2, 1] = bad
            optimizer.zero_grad()
            loss_of(model(x)).real.mean().backward()
            optimizer.step()
    assert guard.incidents
    return guard.incidents[0]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], complex, str]] = {
    "log": (torch.log, 0, "WN101"),
    "log2": (torch.log2, 0, "WN101"),
    "log1p": (lambda z: torch.log1p(z - 1), 0, "WN101"),
    "reciprocal": (torch.reciprocal, 0, "WN106"),
    "rsqrt": (torch.rsqrt, 0, "WN106"),
    "a tensor of powers": (lambda z: z ** torch.full((3,), -0.5), 0, "WN106"),
    "division": (lambda z: 1 / z, 0, "WN103"),
    "phase": (lambda z: z / z.abs(), 0, "WN104"),
    "atanh": (lambda z: torch.atanh(z + 1), 0, "WN107"),
    "slope of sqrt": (torch.sqrt, 0, "WN501"),
    "slope of a power": (lambda z: z**0.5, 0, "WN501"),
    "slope of acos": (lambda z: torch.acos(z + 1), 0, "WN501"),
    "where": (lambda z: torch.where(z.abs() > 0, torch.sqrt(z), 0), 0, "WN502"),
    "exp": (torch.exp, 200, "WN201"),
    "softmax by hand": (lambda z: torch.exp(z) / torch.exp(z).sum(1, keepdim=True), 200, "WN303"),
    "square": (torch.square, 1e30, "WN203"),
    "matrix product": (lambda z: z @ z.T, 1e30, "WN203"),
    "slope of asinh": (torch.asinh, 1e30, "WN503"),
    "a masked logarithm": (lambda z: torch.log(z) * (z.abs() > 0), 0, "WN302"),
    "a singular matrix": (lambda z: torch.linalg.slogdet(torch.diag(z[2]))[1], 0, "WN108"),
    "data": (torch.square, complex("nan"), "WN701"),
}


@pytest.mark.parametrize(("loss", "bad", "code"), CASES.values(), ids=list(CASES))
def test_every_rule_can_be_asked_about_complex_numbers(loss: Callable[[Tensor], Tensor], bad: complex, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule fails, also none that is not reached because another fits first; what is found is what it would be among real numbers."""

    def ask_all(scene: Scene) -> tuple[Rule, Finding]:
        for each in rules().values():
            each.find(scene)
        return first_match(scene)

    monkeypatch.setattr(verdict, "first_match", ask_all)
    assert first_incident(loss, bad).cause.code == code


@pytest.mark.parametrize(("loss", "bad"), [(torch.log, 0), (torch.sqrt, 0), (lambda z: torch.acos(z + 1), 0)])
def test_only_the_edge_itself_counts(loss: Callable[[Tensor], Tensor], bad: complex) -> None:
    """One entry of 18 is at the edge; that others have a negative real part or a size above 1 says nothing."""
    assert any("1 of 18" in words for words in first_incident(loss, bad).cause.evidence)


@pytest.mark.parametrize("loss", [torch.log, torch.sqrt], ids=["log", "sqrt"])
def test_a_change_for_complex_numbers_puts_no_bound_under_them(loss: Callable[[Tensor], Tensor]) -> None:
    """A clamp would raise; what is offered runs and is proven."""
    remedy = first_incident(lambda z: loss(z), 0).remedies[0]  # the change is written here
    assert (remedy.result, "clamp" in remedy.diff) == ("proven", False)
