"""A remedy is tried some updates further on: one good step can lead nowhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Sandbox

from whynan.causes.onward import UPDATES

FURTHER = f"still finite {UPDATES} updates further on"

EDGE = """
    import torch
    w = torch.nn.Parameter(torch.tensor(1.0))
    opt = torch.optim.SGD([w], lr=0.01)
    for step in range(12):
        x = torch.linspace(-1.0, 0.0, 4)
        if step == 8:
            x[2], x[3] = w.detach() - 2e-7, w.detach() + 0.1
        loss = (w - x).sqrt().mean() + torch.exp(-100 * w)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

COPULA = """
    import torch
    gen = torch.Generator().manual_seed(77)
    z = torch.randn(2, 400, 2, generator=gen)
    r = torch.tensor([0.7, -0.6])[:, None]
    y = torch.stack([z[..., 0], r * z[..., 0] + (1 - r ** 2).sqrt() * z[..., 1]], -1)
    u, v = torch.special.ndtr(y).clamp(1e-4, 1 - 1e-4).unbind(-1)
    theta = torch.tensor([[0.8], [0.6]], requires_grad=True)
    opt = torch.optim.Adam([theta], lr=0.023)
    for it in range(60):
        density = u.pow(-theta) + v.pow(-theta) - 1
        loss = -(torch.log1p(theta) - (1 + theta) * (u.log() + v.log()) - (2 + 1 / theta) * density.log()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

GEV = """
    import torch
    torch.manual_seed(9)
    data = 30 + 8 * (1 - (-torch.log(torch.rand(150))) ** 0.4) / 0.4
    loc, logscale, shape = (torch.nn.Parameter(torch.tensor(v)) for v in (25.0, 2.0, 0.1))
    opt = torch.optim.SGD([{"params": [loc], "lr": 4.0}, {"params": [logscale], "lr": 0.02}, {"params": [shape], "lr": 0.5}])
    for it in range(40):
        t = (1 + shape * (data - loc) / logscale.exp()) ** (-1 / shape)
        loss = logscale - ((shape + 1) * t.log() - t).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

STEEP = """
    import torch
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=10.0)
    for step in range(12):
        x = torch.randn(16, 4)
        if step == 8:
            x[3] = 0.0
        far = (net(x) - net.bias).square().sum(1).sqrt()
        loss = 1000 * (far.mean() + (net(x) - x.sum(1, keepdim=True)).square().mean())
        opt.zero_grad()
        loss.backward()
        LIMIT
        opt.step()
"""


def first(done: Any) -> dict[str, Any]:
    incident: dict[str, Any] = done.incidents[0]
    return incident


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (EDGE, "finite now, but not finite one update further on"),
        (COPULA, "finite, but nothing leads back: 1 of 800 elements are outside of the domain"),
        (GEV, "finite, but nothing leads back: 1 of 150 elements"),
    ],
    ids=["edge", "copula", "gev"],
)
def test_a_bound_that_leads_astray_is_no_remedy(box: Sandbox, program: str, words: str) -> None:
    """Each of these clamps makes its step finite, with a gradient that is alive; the cause is proven by that, the remedy is not."""
    incident = first(box.watched(program))
    tried = [r for r in incident["remedies"] if r["result"] == "failed"]
    assert any(r["effect"].startswith(words) for r in tried), [r["effect"] for r in tried]
    assert not any(r["result"] == "proven" for r in incident["remedies"])
    assert incident["cause"]["confidence"] == "proven"


def test_updates_are_clipped_as_the_program_clips_them(box: Sandbox) -> None:
    """A rate that only clipping makes bearable: the walk clips as well, also the one from the capsule."""
    done = box.watched(STEEP.replace("LIMIT", "torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)"))
    assert FURTHER in first(done)["remedies"][0]["effect"]
    again = box.forked("replay", str(box.run_dir))
    assert FURTHER in " ".join(again.out.split()), again.err


def test_updates_that_nobody_clips_are_not_clipped(box: Sandbox) -> None:
    """The same, but what kept the updates small before is not known to be for all of them."""
    done = box.watched(STEEP.replace("LIMIT", "opt.param_groups[0]['lr'] = 1e-6 if step < 8 else 10.0"))
    assert not any(FURTHER in r["effect"] for r in first(done)["remedies"])


def test_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Weights, their version counters, moments and random numbers are as they were before the diagnosis."""
    import whynan
    from whynan.causes import trying

    walks: list[Any] = []
    walked = trying.onward

    def watched(scene: Any, put: Any, stopped: Any) -> Any:
        def state() -> Any:
            return copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p._version for p in model.parameters()], torch.get_rng_state().tolist()))

        before = state()
        walks.append(walked(scene, put, stopped))
        after = state()
        assert str(before) == str(after)
        return walks[-1]

    monkeypatch.setattr(trying, "onward", watched)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = whynan.watch(model, optimizer, run_dir=tmp_path / "run")
    for step in range(12):
        x = torch.randn(8, 3)
        y = model(x)
        loss = (y * float(step != 6)).square().sum(1).sqrt().mean() + y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    guard.close()
    assert any(walk is not None and len(walk.outcomes) == UPDATES + 1 for walk in walks)
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_optimizer_that_needs_a_closure_is_not_walked_with(box: Sandbox) -> None:
    """It says nothing of further updates then, and the remedy is judged as before."""
    done = box.watched("""
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
        opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
        for step in range(6):
            x = torch.randn(8, 2) * (step != 4)

            def closure():
                opt.zero_grad()
                loss = net(x).square().mean() + (net(x) - net.bias).square().sum(1).sqrt().mean()
                loss.backward()
                return loss

            opt.step(closure)
        """)
    assert first(done)["remedies"][0]["result"] == "proven"
    assert "further on" not in first(done)["remedies"][0]["effect"]


SEEN = """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    torch.manual_seed(0)
    seen = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(1)
            return super().step(closure)

    net = torch.nn.Linear(4, 3)
    opt = MADE
    for step in range(8):
        x = torch.randn(6, 4)
        loss = (net(x) * float(step != 5)).square().sum(1).sqrt().mean() + net(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(len(seen))
"""


@pytest.mark.parametrize(
    ("made", "updates"),
    [
        ("Counting(net.parameters(), 0.1)", "8"),  # with the one that shows what the bad gradients would do
        ("torch.optim.SGD(net.parameters(), 0.1); register_optimizer_step_post_hook(lambda *_: seen.append(1))", "7"),
    ],
    ids=["a step of its own", "a hook for all optimizers"],
)
def test_what_a_program_does_in_an_update_is_not_done_for_further_ones(box: Sandbox, made: str, updates: str) -> None:
    """Nobody walks on where the program would see it."""
    done = box.watched(SEEN.replace("MADE", made))
    assert [i["step"] for i in done.incidents] == [5], done.err
    assert done.out.split() == [updates]
    assert "further on" not in first(done)["remedies"][0]["effect"]
