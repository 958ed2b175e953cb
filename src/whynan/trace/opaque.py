"""Values that an autograd Function of the program makes without torch: in numpy, in a library of C."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from whynan.capsule.sites import Site, is_internal
from whynan.tripwire.values import damage_of, is_mask_like


@dataclass(frozen=True, slots=True)
class Called:
    """A Function in the midst of its call."""

    name: str
    given: list[torch.Tensor]
    site: Site | None  # None: a tape entry is the call itself

    def made(self, value: torch.Tensor, call: str) -> bool:
        """Whether a bad value that no operation made, first seen in a call of torch's, is this Function's own: its arguments are sound, and it is not meant.

        One number handed to `torch.tensor` is taken for an infinity that is written out.
        """
        written = call == "torch.tensor" and value.numel() == 1 and not damage_of(value).nan
        if written or is_mask_like(value):
            return False
        return not any(damage_of(t.detach()) for t in self.given)


def called_now(floor: CodeType) -> Called | None:
    """Return the Function whose forward pass runs, if one does above the frame that runs `floor`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not floor:
        owner: Any = frame.f_locals.get("cls") if "apply" in frame.f_code.co_name and is_internal(frame.f_code) else None
        if _is_function(owner):
            return Called(owner.__name__, _tensors(frame), _caller(frame.f_back, floor))
        frame = frame.f_back
    if frame is None:
        return None
    owner = getattr(getattr(frame.f_locals.get("entry"), "fn", None), "__self__", None)
    return Called(owner.__name__, _tensors(frame), None) if _is_function(owner) else None


def _is_function(owner: Any) -> bool:
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _tensors(frame: FrameType) -> list[torch.Tensor]:
    given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
    return [value for value in given if isinstance(value, torch.Tensor)]


def _caller(frame: FrameType | None, floor: CodeType) -> Site | None:
    while frame is not None and frame.f_code is not floor:
        if not is_internal(frame.f_code):
            return Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None
