"""Calls that raise: over their values, or over what no value changes (shapes, types, devices)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


def refuses_any(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call that raised does so with harmless values, too: no number explains it then.

    >>> refuses_any(torch.ops.aten.add.Tensor, (torch.zeros(2), torch.zeros(3)), {})
    True
    >>> refuses_any(torch.ops.aten.linalg_cholesky_ex.default, (torch.zeros(2, 2),), {"check_errors": True})
    False
    """
    return all(_refuses(func, args, kwargs, fill) for fill in (_halves, _with_diagonal))


def _refuses(func: Any, args: Any, kwargs: dict[str, Any], fill: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    def harmless(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone() if value.dtype is torch.bool else fill(value)
        return 0.5 if type(value) is float else value

    try:
        func(*tree_map(harmless, args), **tree_map(harmless, kwargs))
    except Exception:  # whatever it says: the call is not ours
        return True
    return False


def _halves(value: torch.Tensor) -> torch.Tensor:
    """Return a probability everywhere, or the first index."""
    return torch.full_like(value, 0.5) if value.is_floating_point() or value.is_complex() else torch.zeros_like(value)


def _with_diagonal(value: torch.Tensor) -> torch.Tensor:
    """Return ones, and more on the diagonal of a square matrix: it has an inverse, and every root."""
    ones = torch.ones_like(value)
    if value.ndim > 1 and value.shape[-1] == value.shape[-2]:
        ones.diagonal(dim1=-2, dim2=-1).add_(1)
    return ones
