"""What there is to choose about a training program: a `Case` says everything about one, with its fault and the policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import lr_scheduler

STEPS = 7

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, lr=0.02, capturable=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.02, capturable=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "RMSprop capturable": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "LBFGS search": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
}
ONLY_CUDA = ("Adam capturable", "AdamW capturable", "RMSprop capturable")  # torch refuses capturable on the CPU
PRECISIONS = ("float32", "bf16 autocast", "bf16 weights", "fp16 scaler")
PLACES = ("input", "target", "activation", "loss", "one gradient", "all gradients", "one parameter", "one buffer", "one moment", "scaler")
IN_STATE = ("one parameter", "one buffer", "one moment", "scaler")  # made bad from outside, between two steps
POLICIES = ("skip", "skip:1,rollback", "rollback:2", "observe", "stop")
CODES = {
    "input": ("WN701",), "target": ("WN702",), "activation": ("WN103", "WN104"), "loss": ("WN101",), "one gradient": ("WN501",),
    "all gradients": ("WN501",), "one parameter": ("WN601",), "one buffer": ("WN602",), "one moment": ("WN603",), "scaler": ("WN606",),
}  # fmt: skip

Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Schedule | None] = {
    "none": None,
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0 / (1 + n)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=_has_momentum(o)),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 0.5, total_iters=3), lr_scheduler.StepLR(o, 2)]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}

REST: dict[str, tuple[Any, ...]] = {
    "at": (3, 0, 1, 2, 4, 5),
    "again": (False, False, True),
    "accumulate": (1, 1, 2, 3),
    "micro": (0, 1, 2),
    "drop_alone": (False, False, True),
    "parts": ("batch", "plain", "weight", "spectral", "batch weight", "dropout"),
    "counter": ("in place", "anew"),
    "scheduler": tuple(SCHEDULERS),
    "rhythm": ("step", "epoch"),
    "wall_steps": (False, False, True),
    "average": ("none", "ema", "swa", "told"),
    "clip": ("none", "norm", "value", "scaled"),
    "zero": ("before", "after", "in place", "model"),
    "way": ("attached", "made inside", "step function", "whole step function", "closure"),
    "read": ("never", "before backward", "after backward"),
    "snapshot_every": (1, 2, 100),
    "snapshots": ("host", "device"),
}


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return "betas" in group or bool(group.get("momentum"))


@dataclass(frozen=True)
class Case:
    """One program, its fault and what is to be done about it."""

    optimizer: str = "SGD momentum"
    precision: str = "float32"
    place: str = "loss"
    policy: str = "skip"
    device: str = "cpu"
    at: int = 3  # the optimizer step that the fault falls on
    again: bool = False  # and once more in the step after it
    accumulate: int = 1  # micro-batches in a step
    micro: int = 0  # which of them is bad
    drop_alone: bool = False
    parts: str = "batch"
    counter: str = "in place"  # how the model's own buffer moves
    scheduler: str = "none"
    rhythm: str = "step"
    wall_steps: bool = False
    average: str = "none"
    clip: str = "none"
    zero: str = "before"
    way: str = "attached"
    read: str = "never"
    snapshot_every: int = 1
    snapshots: str = "host"
    scale: float = float("inf")  # what a bad scale is set to

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler is at work."""
        return self.precision == "fp16 scaler"

    @property
    def closure(self) -> bool:
        """Whether the optimizer gets a closure; a gradient scaler takes none."""
        return self.optimizer.startswith("LBFGS") or (self.way == "closure" and not self.scales and self.optimizer != "Muon")

    @property
    def bad_steps(self) -> set[int]:
        """The steps with a fault; bad state is made once."""
        twice = self.again and self.place not in IN_STATE
        return {self.at, self.at + 1} if twice else {self.at}

    @property
    def alone(self) -> bool:
        """Whether the bad micro-batch goes alone: wanted, and its loss is known to be bad before it goes back."""
        return self.drop_alone and self.place in ("input", "target", "activation", "loss") and not self.closure

    def impossible(self) -> str:
        """Say why there is no such program."""
        if self.device == "cpu" and self.optimizer in ONLY_CUDA:
            return "torch takes capturable optimizers on an accelerator only"
        if self.optimizer == "SGD fused" and self.precision == "bf16 weights" and self.device == "cpu":
            return "torch's fused SGD on the CPU does not read its momentum in bfloat16 and gives another result every time"
        if self.optimizer == "Adagrad fused" and self.device == "cuda":
            return "torch's fused Adagrad is for the CPU"
        if self.optimizer == "Muon" and not hasattr(torch.optim, "Muon"):
            return "this torch has no Muon"
        if self.scales and self.optimizer.startswith("LBFGS"):
            return "a gradient scaler takes no closure"
        if self.place == "scaler" and not self.scales:
            return "there is no scaler"
        return "SGD without momentum has no moments" if self.place == "one moment" and self.optimizer == "SGD" else ""

    def made_possible(self) -> Case:
        """Return the nearest case that makes sense."""
        changes: dict[str, Any] = {}
        if self.place in IN_STATE:
            changes["at"] = min(max(self.at, 2), STEPS - 3)  # there is state, and a step that could notice
        if self.optimizer == "SGD fused" and self.scales and self.policy == "observe":
            changes["at"] = max(self.at, 1)  # torch makes its momentum of uninitialised memory if the kernel skips the first step
        if self.rhythm == "epoch" and "rollback" in self.policy:
            changes["rhythm"] = "step"
        if self.policy != "skip":
            changes["wall_steps"] = False
        return _with(self, micro=self.micro % self.accumulate, **changes)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{f.name: changes.get(f.name, getattr(case, f.name)) for f in fields(Case)})


def drawn(number: int, **fixed: Any) -> Case:
    """Draw the rest of a case, always the same for one number."""
    rng = random.Random(number)
    return Case(**fixed, **{name: rng.choice(values) for name, values in REST.items()}).made_possible()
