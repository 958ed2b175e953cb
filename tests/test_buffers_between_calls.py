"""Buffers that a program writes between two calls of their module in one step: a normaliser that learns from a rollout before it is trained on."""

from __future__ import annotations

import pytest
from conftest import Sandbox

PROGRAM = """
    import torch
    from torch import nn

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def update(self, x):
            with torch.no_grad():
                {update}

        def forward(self, x):
            return (x - self.mean) / (self.var + 1e-8).sqrt()

    torch.manual_seed(0)
    norm = Norm()
    net = nn.Sequential(norm, nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(10):
        x = torch.randn({rows}, 4)
        net.train()
        {before}
        norm.update(x)
        net.train({training})
        loss = (net(x).squeeze(-1) - x.sum(1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print([b.double().sum().item() for b in net.buffers()], [p.double().sum().item() for p in net.parameters()])
"""
UPDATES = {
    "in place": "self.mean.lerp_(x.mean(0), 0.1); self.var.lerp_(x.var(0), 0.1)",
    "copied": "self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0)); self.var.copy_(0.9 * self.var + 0.1 * x.var(0))",
    "assigned": "self.mean = 0.9 * self.mean + 0.1 * x.mean(0); self.var = 0.9 * self.var + 0.1 * x.var(0)",
}
BEFORE = {"a rollout": "with torch.no_grad(): net(torch.randn(5, 4))", "a call with gradients": "net(torch.randn(5, 4))", "nothing": "pass"}


def program(update: str, before: str, rows: str = "1 if step == 5 else 16", training: str = "step != 5") -> str:
    return PROGRAM.format(update=update, before=before, rows=rows, training=training)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("before", BEFORE)
def test_the_line_that_made_the_buffer_bad_is_told(box: Sandbox, update: str, before: str) -> None:
    """It was WN802, faulty hardware: the replay took the module back to before the write, and did not write again."""
    done = box.watched(program(UPDATES[update], BEFORE[before]))
    assert [(i["step"], i["cause"]["code"], "x.var(0)" in i["origin"]["code"]) for i in done.incidents] == [(5, "WN403", True)], done.err
    assert done.incidents[0]["remedies"][0]["result"] == "proven"
    assert "nan" not in done.out


@pytest.mark.parametrize("update", UPDATES)
def test_the_replay_is_exact(box: Sandbox, update: str) -> None:
    """The loss of a finite step is the one of the run, with statistics that move in both calls, and nothing of it stays."""
    source = program(UPDATES[update], BEFORE["a rollout"], "16", "True").replace(
        ".square().mean()\n", ".square().mean()\n        root = (net[1].weight * float(step != 6)).square().sum(0).sqrt().mean(); loss = loss + 0 * root\n"
    )
    done = box.watched(source)
    incident = done.incidents[0]
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["exact"]) == (6, "WN501", True), done.err
    told = next(e for e in incident["cause"]["evidence"] if "the loss (" in e)
    (said,) = [r["effect"].split("loss ")[1].split(",")[0] for r in incident["remedies"] if r["result"] == "proven"][:1]
    assert f"({said})" in told


@pytest.mark.parametrize("update", UPDATES)
def test_a_healthy_program_is_unharmed(box: Sandbox, update: str) -> None:
    """Bit for bit the same buffers and weights, with and without."""
    source = program(UPDATES[update], BEFORE["a rollout"], "16", "True")
    assert box.watched(source).out == box.plain(box.write(source)).out
