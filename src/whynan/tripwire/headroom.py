"""How far values are from the end of their dtype, in doublings.

Watched, because it costs nothing: the loss and the gradient norm in the dtype they were computed in, at every step.
Watched every 100 steps: weights and buffers in float16. Not watched: activations (that would cost a pass over each of
them), weights in bfloat16 and float32 (they end at 3e38; a curve spikes long before), float8 (saturates by design), and
values multiplied by a loss scale, which a gradient scaler keeps near the end of the range on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from whynan.records import Notice, NoticeKind, number
from whynan.tripwire.late import LateNumbers
from whynan.tripwire.values import plain

EVERY = 100  # steps between two looks at weights: one pass over them every hundredth step is not measurable
WARN = 2.0  # doublings
KEPT = 64  # readings of one weight
RECOVERED = 3.0  # doublings at which a thing may be warned about again


def headroom(largest: float, dtype: torch.dtype) -> float:
    """Return how many doublings are left before a value leaves the range of its dtype.

    >>> round(headroom(7100.0, torch.float16), 1)
    3.2
    >>> headroom(0.0, torch.float16)
    inf
    """
    size = abs(largest)
    if size == 0.0:
        return math.inf
    return math.log2(torch.finfo(dtype).max) - math.log2(size) if math.isfinite(size) else -size


def headroom_text(largest: float, dtype: torch.dtype) -> str:
    """Say the head-room as a person would.

    >>> headroom_text(7100.0, torch.float16)
    '3.2 doublings left before float16 ends at 65504'
    """
    left = headroom(largest, dtype)
    name, end = str(dtype).removeprefix("torch."), number(torch.finfo(dtype).max)
    if math.isnan(left):
        return "not a number"
    if left < 0.05:
        return f"no doubling left: {name} ends at {end}"
    return f"{left:.1f} doublings left before {name} ends at {end}"


class HeadroomWatch:
    """Warns when fewer than two doublings are left, once for each thing until it has recovered.

    >>> watch = HeadroomWatch()
    >>> watch.see(5, "loss", 40000.0, torch.float16).text
    'loss reached 40000 at step 5: 0.7 doublings left before float16 ends at 65504'
    """

    def __init__(self) -> None:
        self._low: set[str] = set()
        self._late = LateNumbers()
        self.readings: dict[str, list[tuple[int, float]]] = {}  # of weights, for the report

    def see(self, step: int, name: str, value: float, dtype: torch.dtype) -> Notice | None:
        """Take one number with the dtype it was computed in. A non-finite one is the tripwire's business."""
        if not math.isfinite(value) or not dtype.is_floating_point:
            return None
        left = headroom(value, dtype)
        if left >= RECOVERED:
            self._low.discard(name)
        if left >= WARN or name in self._low:
            return None
        self._low.add(name)
        return Notice(NoticeKind.HEADROOM, step, name, value, f"{name} reached {number(value)} at step {step}: {headroom_text(value, dtype)}")

    def look(self, step: int, models: Iterable[torch.nn.Module], wait: bool = False) -> list[Notice]:
        """Look at float16 weights and buffers every 100 steps; on CUDA the answer comes at a later call.

        Cost: one fused pass over the float16 weights at every hundredth step; no host sync on CUDA.
        """
        if step % EVERY == 0 and not self._late.under_way:
            self._late.send([((step, name), value) for name, value in _largest(models)])
        found = []
        for label, value in self._late.take(wait):
            assert isinstance(label, tuple)
            found.append(self.see(label[0], label[1], value, torch.float16))
            self._keep(label[0], label[1], value)
        return [notice for notice in found if notice is not None]

    def _keep(self, step: int, name: str, value: float) -> None:
        """Keep a reading; where there are many, every second one goes."""
        kept = self.readings.setdefault(name, [])
        if len(kept) >= KEPT:
            del kept[1::2]
        kept.append((step, value))


def _largest(models: Iterable[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return the largest absolute value of each float16 tensor, on its device."""
    groups: dict[torch.device, dict[int, tuple[str, torch.Tensor]]] = {}
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            dense = plain(tensor.detach()) if tensor.dtype is torch.float16 else None
            if dense is not None and dense.numel() and dense.device.type != "meta":
                groups.setdefault(dense.device, {})[id(tensor)] = (name, dense)
    found: list[tuple[str, torch.Tensor]] = []
    for group in groups.values():
        names, tensors = zip(*group.values(), strict=True)
        found += zip(names, torch._foreach_norm(list(tensors), torch.inf), strict=True)
    return found
