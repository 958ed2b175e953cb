"""A step without the bad terms of its loss: the others are learned from, what only the bad ones reach stays as it is.

The step is replayed with each bad term cut out of the sum it goes into. Weights that no good term reaches have no gradient
then, and an optimizer leaves such weights and their state alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from whynan.capsule.replay import Program
from whynan.capsule.sites import Site
from whynan.causes.fixes import plain_name
from whynan.causes.lab import Swapper
from whynan.tripwire.values import damage_of

TAKEN = "terms dropped"


def without_bad_terms(program: Program, sums: frozenset[Site]) -> int:
    """Put the gradients of the good terms in place of the bad ones; return how many terms were left out, 0 where it cannot be done.

    Cost: one replay of the step.
    """
    mode = Swapper(_cut, sums)
    with program.still(), mode:
        run = program.play(mode)
        losses = [float(t.detach().float().sum()) for t in run.losses]
        grads = [None if p.grad is None else p.grad.detach().clone() for p in program.leaves]
    known = [grad for grad in grads if grad is not None]
    sound = run.error is None and bool(losses) and all(map(math.isfinite, losses)) and not any(damage_of(grad) for grad in known)
    if not (mode.hits and sound and any(bool(grad.to_dense().any()) for grad in known)):
        return 0
    for leaf, grad in zip(program.leaves, grads, strict=True):
        leaf.grad = grad
    return mode.hits


def _cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave a bad scalar out of a sum."""
    if plain_name(func) not in ("add", "sub") or len(args) != 2 or not any(map(_bad, args)):
        return NotImplemented
    return func(*(torch.zeros_like(a.detach()) if _bad(a) else a for a in args), **kwargs)


def _bad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad and bool(damage_of(value.detach()))
