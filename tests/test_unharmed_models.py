"""The promise of a dropped step on models as people write them: a residual network, a transformer, a GAN, a VAE, LBFGS."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unharmed import differences

import whynan

STEPS = 6


def seeded(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Training:
    """A program with a state: `step(n, bad)` trains on batch n."""

    averages: tuple[nn.Module, ...] = ()

    def step(self, number: int, bad: str) -> None:
        """Train on one batch."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return everything that outlives a step."""
        return copy.deepcopy({k: v.state_dict() for k, v in vars(self).items() if hasattr(v, "state_dict")})


class Residual(nn.Module):
    """A block with a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        return F.relu(x + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


class ImageTraining(Training):
    """A small residual network, bf16 autocast, OneCycleLR, a moving average with its buffers."""

    def __init__(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.average = torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)

    def step(self, number: int, bad: str) -> None:
        """Classify."""
        x, y = seeded(4, 3, 9, 9, seed=number), torch.arange(4)
        if bad:
            x[2, 1, 3, 3] = float("inf")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(x), y, label_smoothing=0.1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.net)


class TextTraining(Training):
    """A small transformer, gradient scaler, warm-up, two micro-batches a step; one in which every word is ignored has no mean loss."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.words, self.body, self.head = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 11)
        parameters = [*self.words.parameters(), *self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / 4))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def state(self) -> dict[str, Any]:
        """Leave the function of the schedule out."""
        return {k: {n: v for n, v in s.items() if n != "lr_lambdas"} for k, s in super().state().items()}

    def step(self, number: int, bad: str) -> None:
        """Predict the next word, twice."""
        for part in range(2):
            ids = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(10 * number + part))
            mask = torch.full((6, 6), float("-inf")).triu(1)
            targets = torch.full_like(ids, -100) if bad and part == 1 else ids
            out = self.head(self.body(self.words(ids), mask=mask))
            loss = F.cross_entropy(out[:, :-1].flatten(0, 1), targets[:, 1:].flatten()) / 2
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()


class GanTraining(Training):
    """Two networks with running statistics, two optimizers, two schedulers, two moving averages."""

    def __init__(self) -> None:
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.judge = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.of_judge = torch.optim.Adam(self.judge.parameters(), lr=0.01, betas=(0.5, 0.9))
        self.of_maker = torch.optim.RMSprop(self.maker.parameters(), lr=0.01)
        self.schedule_judge = torch.optim.lr_scheduler.ExponentialLR(self.of_judge, 0.9)
        self.schedule_maker = torch.optim.lr_scheduler.StepLR(self.of_maker, 2)
        self.average_judge, self.average_maker = (torch.optim.swa_utils.AveragedModel(net) for net in (self.judge, self.maker))

    def step(self, number: int, bad: str, left_out: str = "") -> None:
        """The judge learns, then the maker; either can be left out."""
        if left_out != "judge":
            real = seeded(6, 2, seed=number)
            fake = self.maker(seeded(6, 3, seed=100 + number)).detach()
            loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()
            self.update(loss, self.of_judge, self.schedule_judge, bad == "judge")
        if left_out != "maker":
            loss = F.softplus(-self.judge(self.maker(seeded(6, 3, seed=200 + number)))).mean()
            self.update(loss, self.of_maker, self.schedule_maker, bad == "maker")
            self.average_maker.update_parameters(self.maker)
        if left_out != "judge":
            self.average_judge.update_parameters(self.judge)

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, schedule: Any, bad: bool) -> None:
        """Step one of the two."""
        optimizer.zero_grad()
        (loss + torch.sqrt((loss * 0).square()) if bad else loss).backward()
        optimizer.step()
        schedule.step()


class Vae(nn.Module):
    """Mean and log-variance; the log-variance of a far outlier overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 4), nn.Linear(2, 5)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the negative lower bound."""
        mean, log_variance = self.encode(x).chunk(2, 1)
        again = self.decode(mean + noise * torch.exp(0.5 * log_variance))
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1)
        return ((again - x).square().sum(1) + divergence).mean()


class VaeTraining(Training):
    """A VAE whose averaged copy is moved by hand and told to whynan."""

    def __init__(self) -> None:
        self.net = Vae()
        self.copy = copy.deepcopy(self.net)
        self.averages = (self.copy,)
        self.optimizer = torch.optim.Adagrad(self.net.parameters(), lr=0.05)

    def step(self, number: int, bad: str) -> None:
        """Learn, then let the copy follow."""
        x = seeded(6, 5, seed=number) * (1e6 if bad else 1.0)
        self.optimizer.zero_grad()
        self.net(x, seeded(6, 2, seed=100 + number)).backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, new in zip(self.copy.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(new, alpha=0.1)


class LbfgsTraining(Training):
    """LBFGS with a closure; the fault comes at the first or only at a later evaluation of a step."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step(self, number: int, bad: str) -> None:
        """One step of several evaluations."""
        x, y = seeded(8, 4, seed=number), seeded(8, 1, seed=100 + number)
        evaluations = 0

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.net(x), y)
            if bad == "at once" or (bad == "later" and evaluations == 3):
                loss = loss / (loss.detach() * 0)
            loss.backward()
            return loss

        self.optimizer.step(closure)


Make = Callable[[], Training]
MODELS: list[tuple[Make, str]] = [
    (ImageTraining, "bad"), (TextTraining, "bad"), (VaeTraining, "bad"), (LbfgsTraining, "at once"), (LbfgsTraining, "later"),
]  # fmt: skip


def run(make: Make, policy: str | None, bad: dict[int, str], steps: list[int], **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """Train on these batches, watched if there is a policy."""
    torch.manual_seed(0)
    if policy is None:
        training = make()
        for number in steps:
            training.step(number, bad.get(number, ""))
        return training.state(), []
    with contextlib.redirect_stderr(io.StringIO()):
        training = make()
        given = [v for v in vars(training).values() if isinstance(v, nn.Module | torch.optim.Optimizer)]
        with whynan.watch(*given, policy=policy, averages=training.averages, files=False, **options) as guard:
            for number in steps:
                training.step(number, bad.get(number, ""))
    return training.state(), guard.incidents


@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize(("make", "bad"), MODELS)
def test_skip(make: Make, bad: str, at: int) -> None:
    """After a skip every model is where it would be without that batch."""
    state, incidents = run(make, "skip", {at: bad}, list(range(STEPS)))
    expected, _ = run(make, None, {}, [n for n in range(STEPS) if n != at])
    assert [i.action.taken for i in incidents] == ["skipped"]
    assert differences(state, expected) == []


@pytest.mark.parametrize(("make", "bad"), MODELS)
def test_rollback(make: Make, bad: str) -> None:
    """After a rollback every model is where it was at the snapshot, and goes on from there."""
    state, incidents = run(make, "rollback", {4: bad}, list(range(STEPS)), snapshot_every=3)
    expected, _ = run(make, None, {}, [0, 1, 2, 5])
    assert [i.action.taken for i in incidents] == ["rolled back"]
    assert differences(state, expected) == []


@pytest.mark.parametrize("part", ["judge", "maker"])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_gan(part: str, at: int) -> None:
    """In a GAN the bad half of a step is left out and the other half made; running statistics and averages of both networks fit."""
    state, incidents = run(GanTraining, "skip", {at: part}, list(range(STEPS)))
    torch.manual_seed(0)
    expected = GanTraining()
    for number in range(STEPS):
        expected.step(number, "", part if number == at else "")
    assert [i.action.taken for i in incidents] == ["skipped"]
    assert differences(state, expected.state()) == []


def test_rollback_of_a_gan() -> None:
    """A rollback takes both networks, optimizers and schedulers back."""
    state, incidents = run(GanTraining, "rollback", {3: "maker"}, list(range(STEPS)), snapshot_every=4)
    expected, _ = run(GanTraining, None, {}, [0, 1, 4, 5])
    assert [i.action.taken for i in incidents] == ["rolled back"]
    assert differences(state, expected) == []


@pytest.mark.parametrize("validates", [False, True])
def test_a_target_that_writes_its_own_buffers_goes_on(validates: bool) -> None:
    """A named target (BYOL, a mean teacher) is put back once: what its own call writes after that stays, also where it is called without gradients."""
    ends = []
    for left_out in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        target = copy.deepcopy(net).requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        with whynan.watch(net, optimizer, averages=[target], files=False):
            for number in range(8):
                x = seeded(8, 4, seed=number)
                if number == 5:
                    if left_out:
                        continue
                    x[1, 2] = torch.nan
                with torch.no_grad():
                    given = target(x + 0.1)
                optimizer.zero_grad()
                (net(x) - given).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    if validates:
                        target.eval()(seeded(8, 4, seed=99))
                        target.train()
                    for mine, its in zip(net.parameters(), target.parameters(), strict=True):
                        its.lerp_(mine, 0.1)
        ends.append({"net": net.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict()})
    assert not differences(*ends)
