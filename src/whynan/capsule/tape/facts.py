"""What is asked of a tensor, also of one that torch refuses to say it of: its version, its node, its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin as _Lazy  # type: ignore[attr-defined]

_OPAQUE = frozenset({torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2, getattr(torch, "float4_e2m1fn_x2", None)})


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


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor can be read and compared one by one: it is dense, and more than a shape or somebody else's layout.

    >>> is_readable(torch.eye(2)), is_readable(torch.eye(2).to_sparse()), is_readable(torch.eye(2, device="meta"))
    (True, False, False)
    """
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return dense and tensor.dtype not in _OPAQUE and not tensor._is_zerotensor() and not is_released(tensor)  # type: ignore[attr-defined]


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be copied, written to, and put back: not one of inference mode, nor released, nor one that repeats its numbers.

    >>> is_memory(torch.eye(2)), is_memory(torch.eye(2).to_sparse()), is_memory(torch.zeros(1).expand(4))
    (True, True, False)
    """
    if tensor.is_inference() or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor():  # type: ignore[attr-defined]
        return False
    return tensor.layout is not torch.strided or (torch._debug_has_internal_overlap(tensor) != 1 and not is_released(tensor))


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
