"""What is asked of a tensor, also of one that torch refuses to say it of: its version, its node, its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin as _Lazy  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; inference tensors have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def node_of(tensor: torch.Tensor) -> Any:
    """Return the autograd node of a tensor; None also for a view made under no_grad of a weight that was written to since, of which torch refuses to say."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether gradients end in a tensor; such a view is no leaf."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def memory_of(tensor: torch.Tensor) -> int:
    """Identify the memory a tensor lives in."""
    if isinstance(tensor, _Lazy):
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return how much memory a dense tensor takes; what a sparse one holds is small."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def is_released(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor was given back, as `fully_shard` does between two uses of a weight: to read it ends the process."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or isinstance(tensor, _Lazy):
        return False
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):
        return False
