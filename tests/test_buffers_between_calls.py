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


MOMENTUM = """
    import copy, torch
    from torch import nn

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
            self.key = copy.deepcopy(self.query).requires_grad_(False)

        def forward(self, a, b):
            with torch.no_grad():
                for q, k in zip(self.query.parameters(), self.key.parameters()):
                    {update}
            return self.query(a) - self.key(b)

    torch.manual_seed(0)
    net = Momentum()
    opt = torch.optim.SGD(net.query.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        a, b = torch.randn(8, 4), torch.randn(8, 4)
        if {left_out}:
            continue
        far = net(a, b).square().sum(-1) * (torch.arange(8) != (2 if step == 6 else 9))
        loss = far.sqrt().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print([p.double().sum().item() for p in net.parameters()])
"""


@pytest.mark.parametrize("update", ["k.mul_(0.9).add_(q, alpha=0.1)", "k.data = 0.9 * k.data + 0.1 * q.data", "k.data.lerp_(q.data, 0.1)"])
def test_a_momentum_encoder_that_forward_passes_move_is_as_before_a_dropped_step(box: Sandbox, update: str) -> None:
    """Each replay moved it on, and nothing put it back."""
    done = box.watched(MOMENTUM.format(update=update, left_out="False"))
    without = box.plain(box.write(MOMENTUM.format(update=update, left_out="step == 6"), "without.py"))
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(6, "WN501")], done.err
    assert done.out == without.out


def test_a_buffer_that_grows_is_put_back(box: Sandbox) -> None:
    """A memory bank that is appended to after each step: to give it its old size is part of a replay."""
    done = box.watched("""
        import torch
        from torch import nn
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        net.register_buffer("bank", torch.zeros(1, 4))
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(8):
            x = torch.randn(6, 4)
            y = net(x)
            far = (torch.cat([y, net.bank]).square().sum(-1) * (torch.arange(6 + len(net.bank)) != (2 if step == 5 else 99)) + 1.0 * (step < 5)).sqrt()
            loss = far.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                net.bank.resize_(len(net.bank) + 1, 4)[-1] = y.mean(0)
        print(len(net.bank), bool(net.weight.isfinite().all()))
        """)
    assert "internal error" not in done.err
    assert done.out.split() == ["9", "True"]
