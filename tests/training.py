"""A small training program as a `Case` describes it, run over a list of events."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from choices import OPTIMIZERS, SCHEDULERS, STEPS, Case
from torch import nn
from torch.optim import lr_scheduler, swa_utils

BATCH = 6
Event = tuple[str, int, int]  # "step", "wall" or "epoch"; the number of the step; the micro-batch left out, or -1


class Net(nn.Module):
    """A model with parts that a forward pass changes: statistics, power iterations, a buffer and a plain number."""

    def __init__(self, parts: str, counter: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 1)
        self.norm = nn.BatchNorm1d(5) if "batch" in parts else nn.LayerNorm(5)
        self.drop = nn.Dropout(0.2 if parts == "dropout" else 0.0)
        if "weight" in parts:
            nn.utils.parametrizations.weight_norm(self.a)
        if parts == "spectral":
            nn.utils.parametrizations.spectral_norm(self.a)
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(5))
        self.counter, self.seen = counter, 0

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        """Run the layers and leave marks."""
        hidden = self.drop(torch.tanh(self.norm(self.a(x)))) + 0.125
        if bad:
            hidden = hidden / torch.zeros_like(hidden)
        if self.training:
            self.seen += 1
            if self.counter == "in place":
                self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            else:
                self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0).to(self.average.dtype)
        return self.b(hidden)


class World:
    """Everything that makes up the state of one program."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.net = Net(case.parts, case.counter).to(case.device, torch.bfloat16 if case.precision == "bf16 weights" else torch.float32)
        self.scaler = torch.amp.GradScaler(case.device, init_scale=64.0, growth_interval=3, enabled=case.scales)
        self.averaged = copy.deepcopy(self.net) if case.average == "told" else None

    def make_optimizers(self) -> None:
        """Make the optimizers and what follows them; inside a watched block or before it."""
        case = self.case
        self.optimizers = _optimizers(case.optimizer, self.net)
        schedule = SCHEDULERS[case.scheduler]
        self.schedulers = [schedule(o) for o in self.optimizers] if schedule is not None else []
        self.model_average = _average(case.average, self.net)

    def state(self) -> dict[str, Any]:
        """Return the whole state."""
        averages = [m.state_dict() for m in (self.averaged, self.model_average) if m is not None]
        return copy.deepcopy(
            {
                "model": self.net.state_dict(),
                "seen": self.net.seen,
                "optimizers": [o.state_dict() for o in self.optimizers],
                "schedulers": [_plain(s.state_dict()) for s in self.schedulers],
                "scaler": self.scaler.state_dict(),
                "averages": averages,
            }
        )


def _optimizers(name: str, net: Net) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    if name != "Muon":
        return [OPTIMIZERS[name](list(parameters))]
    matrices = [p for p in parameters if p.dim() == 2]  # all that Muon takes
    return [OPTIMIZERS[name](list(matrices)), torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.02)]


def _average(name: str, net: Net) -> swa_utils.AveragedModel | None:
    if name == "swa":
        return swa_utils.AveragedModel(net)
    return swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True) if name == "ema" else None


def _plain(state: Any) -> Any:
    """Leave functions out of a scheduler's state."""
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in state.items() if not callable(v)}
    return [_plain(v) for v in state] if isinstance(state, list) else state


class Player:
    """Runs the events of one program."""

    def __init__(self, case: Case, faulty: bool) -> None:
        self.case, self.faulty = case, faulty
        self.world = World(case)
        self.batches = {(n, m): self.prepared(n, m) for n in range(STEPS) for m in range(case.accumulate)}
        self.losses: dict[int, list[float]] = {}
        self.left_out = -1
        self.mark: Callable[[Any], Any] = lambda function: function

    def fault(self, number: int, micro: int) -> str:
        """The fault of a micro-batch, if it has one."""
        case = self.case
        return case.place if self.faulty and micro == case.micro and number in case.bad_steps else ""

    def prepared(self, number: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch as a loader hands it out."""
        x, y = (t.to(self.case.device) for t in batch(number, micro))
        if self.fault(number, micro) == "input":
            x[1, 2] = float("nan")
        if self.fault(number, micro) == "target":
            y[1, 0] = float("nan")
        return x, y

    def play(self, events: list[Event]) -> None:
        """Run everything."""
        whole = self.mark(self.step) if self.case.way == "whole step function" else self.step
        self.go_back = self.mark(self.accumulate) if self.case.way == "step function" else self.accumulate
        for kind, number, self.left_out in events:
            if kind == "step":
                if self.faulty and number == self.case.at:
                    elsewhere = threading.Thread(target=self.spoil_state)  # unseen, as faulty memory or other code would
                    elsewhere.start()
                    elsewhere.join()
                whole(number)
                self.follow()
            elif kind == "wall" or self.case.rhythm == "epoch":
                self.move_schedulers()

    def step(self, number: int) -> None:
        """One optimizer step."""
        case, world = self.case, self.world
        if case.closure:
            world.optimizers[0].step(lambda: self.closure(number))
        else:
            if case.zero in ("before", "in place", "model"):
                self.zero()
            self.go_back(number)
            self.clip()
            self.update()
            if case.zero == "after":
                self.zero()

    def closure(self, number: int) -> torch.Tensor:
        """What an optimizer that evaluates the loss itself gets."""
        self.zero()
        loss = self.go_back(number)
        self.clip()
        return loss

    def zero(self) -> None:
        """Drop the gradients in one of the usual ways."""
        if self.case.zero == "model":
            self.world.net.zero_grad()
        else:
            for optimizer in self.world.optimizers:
                optimizer.zero_grad(set_to_none=self.case.zero != "in place")

    def accumulate(self, number: int) -> torch.Tensor:
        """Forward and backward of every micro-batch of a step."""
        total = torch.zeros((), device=self.case.device)
        self.losses[number] = []
        for micro in range(self.case.accumulate):
            if micro == self.left_out:
                continue
            if self.case.parts == "dropout":
                torch.manual_seed(100 * number + micro)  # it draws the same in a run that never drew another batch
            loss = self.loss(number, micro) / self.case.accumulate
            self.read(number, loss, "before backward")
            self.world.scaler.scale(loss).backward()
            self.read(number, loss, "after backward")
            if self.case.closure:
                total = total + loss.detach()
        return total

    def read(self, number: int, loss: torch.Tensor, when: str) -> None:
        """Look at the loss as a progress bar does."""
        if self.case.read == when:
            self.losses[number].append(loss.item())

    def loss(self, number: int, micro: int) -> torch.Tensor:
        """The loss of one micro-batch, with its fault."""
        case = self.case
        fault = self.fault(number, micro)
        x, y = self.batches[number, micro]
        net = self.world.net
        half = {"bf16 autocast": torch.bfloat16, "fp16 scaler": torch.float16}.get(case.precision)
        with torch.autocast(case.device, dtype=half, enabled=half is not None):
            out = net(x.to(net.b.weight.dtype), fault == "activation")
        loss = nn.functional.mse_loss(out.float(), y)
        if fault == "loss":
            loss = loss + torch.log((out.float() * 0).sum())
        if fault == "one gradient":
            loss = loss + torch.sqrt((net.b.bias.float() * 0).square().sum())
        if fault == "all gradients":
            loss = loss + torch.sqrt((out.float() * 0).square().sum())
        return loss

    def clip(self) -> None:
        """Clip in one of the usual ways; before the gradients are unscaled is wrong and done."""
        world, way = self.world, self.case.clip
        if way in ("norm", "value") and self.case.scales:
            for optimizer in world.optimizers:
                world.scaler.unscale_(optimizer)
        if way in ("norm", "scaled"):
            nn.utils.clip_grad_norm_(world.net.parameters(), 1.0)
        elif way == "value":
            nn.utils.clip_grad_value_(world.net.parameters(), 0.5)

    def update(self) -> None:
        """Step the optimizers."""
        world = self.world
        for optimizer in world.optimizers:
            world.scaler.step(optimizer)
        world.scaler.update()

    def follow(self) -> None:
        """Schedulers and averages follow the update."""
        world = self.world
        if self.case.rhythm == "step":
            self.move_schedulers()
        if world.model_average is not None:
            world.model_average.update_parameters(world.net)
        if world.averaged is not None:
            with torch.no_grad():
                for mine, new in zip(world.averaged.parameters(), world.net.parameters(), strict=True):
                    mine.lerp_(new, 0.25)
                for mine, new in zip(world.averaged.buffers(), world.net.buffers(), strict=True):
                    mine.copy_(new)

    def move_schedulers(self) -> None:
        """Move the schedulers; a plateau is judged by a validation loss."""
        for scheduler in self.world.schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.validation())
            else:
                scheduler.step()

    def validation(self) -> float:
        """The loss on a batch that is kept for it."""
        net = self.world.net
        x, y = (t.to(self.case.device) for t in batch(99, 0))
        net.eval()
        with torch.no_grad():
            loss = (net(x.to(net.b.weight.dtype)).float() - y).square().mean()
        net.train()
        return float(loss)

    def spoil_state(self) -> None:
        """Make something of the state bad."""
        world, place = self.world, self.case.place
        with torch.no_grad():
            if place == "one parameter":
                world.net.b.weight[0, 1] = float("nan")
            elif place == "one buffer":
                statistics = getattr(world.net.norm, "running_mean", None)
                (world.net.average if statistics is None else statistics)[1] = float("nan")
            elif place == "one moment":
                moment(world.optimizers[0]).view(-1)[0] = float("nan")
            elif place == "scaler" and world.scaler._scale is not None:
                world.scaler._scale.fill_(self.case.scale)


def moment(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A tensor of an optimizer's state that its next update is made of."""
    state = next(s for s in optimizer.state.values() if s)
    names = ("momentum_buffer", "exp_avg", "sum", "square_avg", "old_dirs")
    found = next(state[n] for n in names if n in state)
    made: torch.Tensor = found[-1] if isinstance(found, list) else found
    return made


def batch(number: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batch of a number."""
    generator = torch.Generator().manual_seed(1000 * number + micro)
    return torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 1, generator=generator)
