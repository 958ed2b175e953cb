"""Optimizers that hold another one: a wrapper (Lookahead), or one that moves the weights twice in a step (SAM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def with_inner(thing: Any, depth: int = 3) -> Iterator[Any]:
    """Yield what was given, and of an optimizer those that it keeps in its attributes.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    >>> optimizer.inner = torch.optim.Adam(optimizer.param_groups)
    >>> [type(o).__name__ for o in with_inner(optimizer)]
    ['SGD', 'Adam']
    """
    yield thing
    if isinstance(thing, torch.optim.Optimizer) and depth:
        for value in vars(thing).values():
            if isinstance(value, torch.optim.Optimizer):
                yield from with_inner(value, depth - 1)
