"""Folders of checkpoints as trainings leave them, healthy and broken in known ways."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """A small network with everything a checkpoint may hold: a convolution, BatchNorm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.stem(x))).mean((2, 3)))


class Training:
    """A training whose state can be saved after every step."""

    def __init__(self, lr: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.step = 0

    def run(self, steps: int = 1) -> Training:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale((self.model(torch.randn(4, 3, 8, 8)) - 1).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step += 1
        return self

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        copied = pickle.loads(pickle.dumps({name: part.state_dict() for name, part in parts.items()}))
        return {**copied, "step": self.step}


class Hostile:
    """A pickle that would run a command when it is loaded."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


Break = Callable[[dict[str, Any]], None]


def nan_weight(state: dict[str, Any]) -> None:
    state["model"]["head.weight"][2, 3] = float("nan")


def inf_weight(state: dict[str, Any]) -> None:
    state["model"]["stem.weight"][0, 0, 1, 1] = float("inf")


def nan_moment(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["exp_avg"][0] = float("nan")


def negative_moment(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][1]["exp_avg_sq"][0] = -1e-4


def negative_variance(state: dict[str, Any]) -> None:
    state["model"]["norm.running_var"][4] = -0.25


def nan_mean(state: dict[str, Any]) -> None:
    state["model"]["norm.running_mean"][0] = float("nan")


def dead(state: dict[str, Any]) -> None:
    for value in state["model"].values():
        value.zero_()


def collapsed_scaler(state: dict[str, Any]) -> None:
    state["scaler"]["scale"] = 2.0**-30
    state["scaler"]["_growth_tracker"] = 0


def save_series(folder: Path, count: int, breaks: dict[int, Break] | None = None, name: str = "step-{:05d}.pt") -> Path:
    """Save a checkpoint after every step; some of them broken."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training()
    for step in range(1, count + 1):
        state = training.run().state()
        if breaks and step in breaks:
            breaks[step](state)
        torch.save(state, folder / name.format(step))
    return folder


def cut(path: Path, share: float = 0.6) -> None:
    """Cut a file off, as a full disk or a killed save does."""
    os.truncate(path, int(path.stat().st_size * share))
