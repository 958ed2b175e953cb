"""Logarithms of exponentials that stand lines or functions apart: the diff changes all places of the proof, and the advice fits the operation."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import HEAD, first, sentences
from test_diffs import healed, program

MIXTURE = """
    prior_one, prior_two = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.0, 0.1)
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.pi = 0.5
            self.mu, self.rho = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.full((8,), -3.0))
        def forward(self, off):
            self.sigma = torch.log1p(torch.exp({rho}))
            w = self.mu + self.sigma * 0.1 + {shift}
            return self.prior(w)
        def prior(self, w):
            one = torch.exp(prior_one.log_prob(w))
            two = torch.exp(prior_two.log_prob(w))
            density = self.pi * one + (1 - self.pi) * two
            return torch.log(density).mean()
    net = Weights()
    def loss_of(bad):
        return -net({off} if bad else 0.0)
"""


@pytest.mark.parametrize(
    ("rho", "shift", "off", "lines"),
    [("self.rho + off", "0.0", 150.0, "softplus"), ("self.rho", "off", 20.0, "torch.logaddexp(torch.as_tensor(self.pi).log() + ")],
    ids=["two places", "a mixture of densities"],
)
def test_the_diff_holds_every_place_that_the_proof_changed(rho: str, shift: str, off: float, lines: str, box: Sandbox) -> None:
    """A softplus by hand in one function and the logarithm of a mixture in another are one remedy; what may not be called twice gets a name."""
    diff = healed(box, program(MIXTURE.format(rho=rho, shift=shift, off=off)))
    assert lines in diff
    assert "torch.exp(exponent := prior_one.log_prob(w))" in diff


NAMED = """
    net = nn.Linear(3, 1)
    def loss_of(bad):
        energy = net(torch.randn(6, 3)).squeeze(1) + (100 if bad else 0)
        grown = torch.exp(energy)
        total = {total}
        return {log}
"""


@pytest.mark.parametrize(
    ("total", "log"),
    [
        ("1 + grown", "torch.log(total).mean()"),
        ("grown", "torch.log1p(total).mean()"),
        ("grown.sum()", "torch.log(total)"),
        ("grown.mean()", "torch.log(total)"),
    ],
    ids=["softplus", "log1p", "logsumexp", "logmeanexp"],
)
def test_exponentials_with_names_have_a_diff_as_well(total: str, log: str, box: Sandbox) -> None:
    """What is added up under a name is written in one call."""
    assert any(call in healed(box, program(NAMED.format(total=total, log=log))) for call in ("softplus", "logsumexp"))


DENSITY = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.means = nn.Parameter(torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]]))
    def densities(self, x):
        return torch.prod(torch.exp(-0.5 * (x[:, None] - self.means) ** 2) / 2.5, 2)
    def forward(self, x):
        return torch.sum(torch.full((3,), 1 / 3) * self.densities(x), dim=1)
net = Mixture()
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(4):
    x = torch.randn(8, 2)
    if step == 2:
        x[0] = {far}
    loss = -torch.log(net(x)).mean()
"""


@pytest.mark.parametrize(("far", "code"), [(10.5, "WN503"), (30.0, "WN101")], ids=["slope past the range", "density of 0"])
def test_a_density_that_is_tiny_is_computed_in_logarithms(far: float, code: str, box: Sandbox) -> None:
    """The product of densities, in a function of its own, goes into the same logsumexp; where the exponentials are is said."""
    incident = first(box, DENSITY.format(far=far), head=HEAD)
    remedy = incident["remedies"][0]
    assert incident["cause"]["code"] == code, sentences(incident)
    assert remedy["result"] == "proven", incident["experiments"]
    assert "logsumexp" in remedy["title"]
    assert ", from the exponents at line" in remedy["title"]


def test_the_slope_of_a_logarithm_is_no_matter_of_unrolls(box: Sandbox) -> None:
    """Where nothing could be replayed the advice is about the logarithm."""
    incident = first(
        box,
        """
net.weight.data.fill_(0.1)
for step in range(4):
    share = net(torch.rand(8, 4)).abs() * (1e-42 if step == 2 else 1.0)
    loss = torch.log(share).mean()
""",
    )
    advice = "; ".join(r["title"] for r in incident["remedies"])
    assert incident["cause"]["code"] == "WN503"
    assert "unrolls" not in advice
    assert "compute in logarithms from the start" in advice
