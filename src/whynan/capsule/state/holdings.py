"""What modules keep in attributes and buffers, and how it is put back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from whynan.capsule.tape.facts import is_memory, is_readable, version_of

BASE_KEYS = frozenset(torch.nn.Module().__dict__)
TABLES = frozenset({dict, OrderedDict, defaultdict, Counter})
CONTAINERS = TABLES | {list, set, deque}


def write_back(copy: torch.Tensor, buffer: torch.Tensor) -> None:
    """Give a buffer its old values, and its old shape where it was resized in place; one that nobody can write to has them still."""
    if not is_memory(buffer):
        return
    if buffer.shape != copy.shape:
        buffer.resize_(copy.shape)
    buffer.copy_(copy)


def own_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules below a root without data-parallel wrappers, whose attributes say what the loop is doing."""
    return [m for m in root.modules() if not type(m).__module__.startswith("torch.nn.parallel")]


def put_back(module: torch.nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module the attributes it had, but not the mode that the loop has set."""
    current = module.__dict__
    kept = {"training": current["training"]} if "training" in current else {}
    for key in [k for k in current if k not in attributes]:
        del current[key]
    current.update(attributes)
    current.update(kept)


def frozen_state(root: torch.nn.Module) -> list[torch.Tensor]:
    """Return what a Keras model keeps as parameters that are not trained: statistics, seeds. A large one is a weight that is frozen."""
    if not any(cls.__module__.startswith("keras.") for cls in type(root).__mro__):
        return []
    return [p for p in root.parameters() if not p.requires_grad and p.numel() <= 1 << 18]


class Mutable:
    """A container or plain tensor kept on a module, with its contents from before; containers inside it too."""

    def __init__(self, value: Any, depth: int = 3) -> None:
        self.value = value
        self.copy = value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
        self.version = version_of(value) if isinstance(value, torch.Tensor) else 0
        inner = value.values() if isinstance(value, dict) else () if isinstance(value, torch.Tensor) else value
        self.inside = [Mutable(v, depth - 1) for v in inner if can_change(v)] if depth and not isinstance(value, set) else []

    def restore(self) -> None:
        if isinstance(self.value, torch.Tensor):
            if self._is_other(self.value):
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.value):  # type: ignore[attr-defined]
                    write_back(self.copy, self.value)
            return
        self.value.clear()
        if isinstance(self.value, dict) and isinstance(self.copy, dict):
            fill(self.value, self.copy)
        elif isinstance(self.value, set):
            self.value.update(self.copy)
        else:
            self.value.extend(self.copy)
        for item in self.inside:
            item.restore()

    def _is_other(self, value: torch.Tensor) -> bool:
        """Whether a tensor was written to: by its numbers, or by its version where they cannot be compared (a sparse one)."""
        return not torch.equal(value, self.copy) if is_readable(value) else version_of(value) != self.version


def fill(table: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Set the values of a table: the `update` of a `Counter` adds, and that of a plain `dict` breaks an `OrderedDict`."""
    for key, value in values.items():
        table[key] = value


def can_change(value: object) -> bool:
    """Whether a value is a plain container or a small tensor of its own that a forward pass could write to."""
    if type(value) in CONTAINERS:
        return len(value) <= 10_000  # type: ignore[arg-type]
    return is_small(value)


def is_small(value: object) -> bool:
    """Whether a value is a small tensor of the program's own that can be written to and put back."""
    return type(value) is torch.Tensor and not value.requires_grad and value.numel() <= 1 << 18 and is_memory(value)


def holdings(attributes: dict[str, Any]) -> list[Any]:
    """Return what a module keeps in plain attributes and could change in place."""
    return [v for k, v in attributes.items() if k not in BASE_KEYS and can_change(v)]
