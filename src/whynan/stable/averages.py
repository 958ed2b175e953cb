"""A moving average that one NaN cannot kill, and the variance kept with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whynan.stable.applying import unwatched

_dot, _FLOAT = torch.dot, torch.float32


class MovingAverage(nn.Module):
    """Keep a moving average of what it is called with; a value that is NaN or inf is refused, counted and said.

    The plain form, `average.mul_(m).add_(value, alpha=1 - m)`, is NaN for ever after one NaN.
    At the edge: entries that are not finite leave their entry of the average as it was; the others are taken in. `refused` counts them. On the CPU
    the first refusal is a RuntimeWarning; on another device the host does not wait for the count: read `refused`, or print the module.
    Before the first accepted value the average is `start`.
    Elsewhere: the plain mean of the first 1 / (1 - momentum) values, within 4 ulps; from there on `average.lerp(value, 1 - momentum)`, to the last bit.

    Called in training mode it takes the value in and returns the new average; in eval mode it returns the average. What it returns carries no
    gradient and is a copy: a later update does not disturb a graph that used it. Double backward has nothing to do here, and `vmap` over the
    update is not supported. Each process keeps its own average: reduce the value first where several train together.

    >>> prior = MovingAverage(2, momentum=0.9)
    >>> prior(torch.tensor([0.2, 0.8]))
    tensor([0.2000, 0.8000])
    >>> with warnings.catch_warnings(record=True) as said:
    ...     prior(torch.tensor([float("nan"), 0.6]))
    tensor([0.2000, 0.7000])
    >>> prior.refused.item(), len(said)
    (1, 1)

    Cost: inside a loss 1.0 to 1.15 times the time of the plain form. The update alone: 3 microseconds more on the CPU, which is 1.25 times for
    64 entries, 1.1 for the mean of 512 x 512; more until the first values are in and after one is refused. No wait for the device.
    """

    average: Tensor
    accepted: Tensor
    refused: Tensor

    def __init__(self, shape: int | Sequence[int] = (), *, momentum: float = 0.99, start: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        self.momentum = momentum
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        self.register_buffer("average", torch.full(size, start, dtype=dtype))
        self.register_buffer("accepted", torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32)))  # bfloat16 counts to 256
        self.register_buffer("refused", torch.zeros((), dtype=torch.int64))
        self._known_full: tuple[Tensor, int] | None = None

    def forward(self, value: Tensor) -> Tensor:
        average = self._buffers["average"]
        assert average is not None
        if not self.training:
            return average.clone()
        alone = unwatched(value)
        if value.requires_grad or not alone:  # a transform may follow a value that itself asks for no gradient
            value = value.detach()
        if value.shape != average.shape:
            raise ValueError(f"the average has shape {tuple(average.shape)}, the value {tuple(value.shape)}")
        if value.dtype is average.dtype and average.is_floating_point() and alone and self._full():
            moved = average.lerp(value, 1 - self.momentum)
            # a number that is finite only if all are; one that overflows is only slow. A dot product of few is faster than a sum
            size = _dot(moved, moved) if moved.dtype is _FLOAT and moved.ndim == 1 else moved.sum()
            if math.isfinite(size.item()):
                average.copy_(moved)
                return moved
        return self._guarded(value.to(average.dtype))

    @torch.no_grad()
    def _guarded(self, value: Tensor) -> Tensor:
        """Take in what is finite, entry by entry."""
        finite = value.isfinite()
        accepted = self.accepted + finite
        share = accepted.clamp_min(1).reciprocal().clamp_min(1 - self.momentum)
        moved = torch.lerp(self.average.to(share.dtype), value.to(share.dtype), share).to(value.dtype)
        average = torch.where(finite, moved, self.average)
        refused = self.refused + finite.logical_not().sum()
        if not torch.compiler.is_compiling() and value.device.type == "cpu":
            self._say(int(refused))
        self.average.copy_(average)
        self.accepted.copy_(accepted)
        self.refused.copy_(refused)
        return average

    def _full(self) -> bool:
        """Whether each entry has taken in 1 / (1 - momentum) values; looked up again only after `accepted` was written."""
        accepted, known = self._buffers["accepted"], self._known_full
        if known is not None and known[0] is accepted and known[1] == accepted._version:
            return True
        assert accepted is not None
        if accepted.is_inference():  # has no version
            return False
        full = accepted.amin().item() * (1 - self.momentum) >= 1
        self._known_full = (accepted, accepted._version) if full else None
        return full

    def _say(self, refused: int) -> None:
        if refused and not self.refused:
            warnings.warn(f"a moving average refused {refused} values that are NaN or inf; it goes on without them", RuntimeWarning, stacklevel=7)

    def extra_repr(self) -> str:
        """Say the shape, the momentum and what was refused."""
        return f"{tuple(self.average.shape)}, momentum={self.momentum}, refused={int(self.refused)}"
