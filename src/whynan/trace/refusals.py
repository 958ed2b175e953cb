"""Calls that raise: over their values, or over what no value changes (shapes, types, devices)."""

from __future__ import annotations

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
    try:
        func(*tree_map(_harmless, args), **tree_map(_harmless, kwargs))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return True
    return False


def _harmless(value: Any) -> Any:
    """Return an argument with other values: ones, on a square matrix's diagonal more; the first index; of flags and sizes the same."""
    if type(value) is float:
        return 1.0
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
        return value
    if not (value.is_floating_point() or value.is_complex()):
        return torch.zeros_like(value)
    ones = torch.ones_like(value)
    if value.ndim > 1 and value.shape[-1] == value.shape[-2]:
        ones.diagonal(dim1=-2, dim2=-1).add_(1)
    return ones
