"""The tensors in nested values: what calls are given and what they return."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CONTAINERS = (tuple, list, dict)
LEAVES = (int, float, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, range)


def tensors_of(tree: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result: nested containers, mappings, dataclasses and plain objects, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (LEAVES, type, torch.nn.Module)):
        return
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_of(item, depth)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_of(item, depth)
    elif depth > 0 and hasattr(tree, "__dict__"):
        for item in list(vars(tree).values()):
            yield from tensors_of(item, depth - 1)
