"""The state of the random generators that are there from the start: torch's, Python's, numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from whynan.capsule.state.surroundings import names_numpy

_generator, _cuda = torch.default_generator, torch.cuda


class ForeignDraws:
    """Whether a module draws from Python's or numpy's generator: asked at its first calls and every 64th, their states are 625 numbers each."""

    __slots__ = ("calls", "drew", "numpy")

    def __init__(self, root: torch.nn.Module) -> None:
        self.calls = 0
        self.drew = False
        self.numpy = names_numpy(root)

    def take(self) -> Rng:
        """Take the states before a call."""
        return take_rng(others=True, numpy=self.numpy)

    def compare(self, before: Rng) -> None:
        """Note whether one of the states moved during a call."""
        self.drew = self.drew or moved(before)


Rng = tuple[torch.Tensor, list[torch.Tensor], Any, Any]


def take_rng(others: bool = False, numpy: bool = True) -> Rng:
    """Take the state of torch's random generators (of the current device; no device wait), and where asked for Python's and numpy's."""
    cuda = [_cuda.get_rng_state()] if _cuda._initialized and _cuda.is_initialized() else []  # the first is asked without a call
    if not others:
        return _generator.get_state(), cuda, None, None
    arrays = sys.modules.get("numpy.random") if numpy else None
    return _generator.get_state(), cuda, random.getstate(), arrays.get_state() if arrays is not None else None


def moved(before: Rng) -> bool:
    """Whether Python's or numpy's generator is in another state now."""
    if before[2] is not None and random.getstate() != before[2]:
        return True
    now = sys.modules["numpy.random"].get_state() if before[3] is not None else ()
    return any(bool((one != other).any()) if hasattr(one, "any") else one != other for one, other in zip(now, before[3] or (), strict=True))


def put_rng(state: Rng) -> None:
    """Put it back."""
    torch.set_rng_state(state[0])
    for value in state[1]:
        torch.cuda.set_rng_state(value)
    if state[2] is not None:
        random.setstate(state[2])
    if state[3] is not None:
        sys.modules["numpy.random"].set_state(state[3])
