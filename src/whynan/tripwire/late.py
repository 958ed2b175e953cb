"""The flag that is read one step late, so that the device is never waited for.

Loss and gradient norm become one flag on the device. A fused optimizer skips by it (`found_inf`) without the host
knowing; the host reads the copy just before the next update, when the device has long moved on. The weights are then
still those of the failing step, so its replay is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from whynan.records import Symptom

_SKIPS_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def can_wait(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update can be skipped on the device (`found_inf`), so that the host may look later."""
    if type(optimizer) not in _SKIPS_ON_DEVICE or hasattr(optimizer, "found_inf"):
        return False
    return all(group.get("fused") and all(p.is_cuda for p in group["params"]) for group in optimizer.param_groups)


@dataclass(slots=True)
class Reading:
    """Loss and norm of one step on their way to the host."""

    values: torch.Tensor
    arrived: torch.cuda.Event
    step: int
    context: object  # what the engine needs to diagnose that step


class LateFlag:
    """One reading at a time, in pinned memory.

    Cost: five small kernels and one asynchronous copy per step; no host sync.
    """

    def __init__(self) -> None:
        self._pending: Reading | None = None
        self.flag: torch.Tensor | None = None
        self.bad_loss: torch.Tensor | None = None

    @property
    def pending(self) -> bool:
        """Whether a step's values are still on their way."""
        return self._pending is not None

    def arm(self, losses: list[torch.Tensor], norm: torch.Tensor | None, step: int, context: object, found: torch.Tensor | None = None) -> None:
        """Gather the flag of this step on the device and send it on its way; `found` is a scaler's own flag in place of a norm."""
        if found is not None:
            norm = torch.where(found > 0, torch.inf, 0.0)
        device = norm.device if norm is not None else losses[-1].device
        loss = torch.stack([x.float().sum() for x in losses]).sum() if losses else torch.zeros((), device=device)
        total = norm.float() if norm is not None else torch.zeros((), device=device)
        self.bad_loss = ~torch.isfinite(loss)
        both = torch.stack([loss.to(device), total.reshape(())])
        self.flag = (~torch.isfinite(both).all()).float()
        host = torch.empty(2, pin_memory=True)
        host.copy_(both, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = Reading(host, arrived, step, context)

    def read(self, use: Callable[[int, float, float, object], str]) -> str:
        """Read the last step's values and pass on what was done about them; by now waiting for them costs nothing."""
        reading, self._pending = self._pending, None
        if reading is None:
            return ""
        reading.arrived.synchronize()
        loss, norm = (float(v) for v in reading.values)
        return use(reading.step, loss, norm, reading.context)


def late_symptom(loss: float, norm: float) -> Symptom:
    """Name what a reading shows."""
    if not math.isfinite(loss):
        return Symptom("loss", "nan" if math.isnan(loss) else "inf", "loss")
    return Symptom("gradient", "nan" if math.isnan(norm) else "inf", "gradient norm")


def is_bad(loss: float, norm: float) -> bool:
    """Whether a reading trips."""
    return not (math.isfinite(loss) and math.isfinite(norm))


_Letter: TypeAlias = tuple[torch.Tensor, torch.cuda.Event | None, list[object]]  # values, when they are there, labels


class LateNumbers:
    """A few numbers on their way to the host, with what they are numbers of.

    Numbers on the CPU are there at once. Those on a CUDA device are there when the device has come to them; they are
    asked for, never waited for. Other devices cannot copy in the background: reading them waits.
    Cost: one stack and one asynchronous copy per device.
    """

    def __init__(self) -> None:
        self._sent: list[_Letter] = []

    @property
    def under_way(self) -> bool:
        """Whether numbers were sent that nobody has taken yet."""
        return bool(self._sent)

    def send(self, numbers: list[tuple[object, torch.Tensor]]) -> None:
        """Send numbers, each with a label."""
        groups: dict[torch.device, list[tuple[object, torch.Tensor]]] = {}
        for label, value in numbers:
            groups.setdefault(value.device, []).append((label, value))
        for device, group in groups.items():
            values = torch.stack([value.detach().reshape(()).float() for _, value in group])
            self._sent.append((*_to_host(values, device), [label for label, _ in group]))

    def take(self, wait: bool = False) -> list[tuple[object, float]]:
        """Return what has arrived; with `wait`, all of it."""
        found: list[tuple[object, float]] = []
        left: list[_Letter] = []
        for values, arrived, labels in self._sent:
            if arrived is not None and wait:
                arrived.synchronize()
            if arrived is None or arrived.query():
                found += zip(labels, values.tolist(), strict=True)
            else:
                left.append((values, arrived, labels))
        self._sent = left
        return found


def _to_host(values: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if device.type != "cuda":
        return values.cpu(), None
    with torch.cuda.device(device):
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return host, arrived
