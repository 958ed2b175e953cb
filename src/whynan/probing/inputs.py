"""What a batch is made of: its tensors by name, what each of them is, and the values it may take."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

import torch

from whynan.tripwire.values import is_mask_like

WIDER = 0.25  # of the observed span, added on both sides where no bounds are stated


class Role(StrEnum):
    """What a tensor of the batch is."""

    FLOATS = "floats"
    MASK = "mask"
    IDS = "ids"
    LABELS = "labels"
    LENGTHS = "lengths"
    INTEGERS = "integers"
    OTHER = "other"  # complex, quantized, empty: left alone


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the batch with the range its values may take."""

    name: str
    value: torch.Tensor
    role: Role
    low: float
    high: float
    stated: bool = False  # the range was given, not observed
    ignore: int | None = None  # the label that means "no label", where the batch uses it
    padding: int | None = None  # the id of padding

    @property
    def on(self) -> bool | float:
        """The two values of a mask: this one ..."""
        return True if self.value.dtype is torch.bool else self.high

    @property
    def off(self) -> bool | float:
        """... and that one."""
        return False if self.value.dtype is torch.bool else self.low

    def holds(self, value: torch.Tensor) -> bool:
        """Whether all values lie in the range; an ignored label does too."""
        if not value.numel() or self.role is Role.OTHER or value.dtype is torch.bool:
            return True
        if self.role is Role.MASK and value.is_floating_point():
            return bool(((value == self.low) | (value == self.high)).all())
        wide = value.detach().double()
        inside = (wide >= self.low) & (wide <= self.high)
        if self.ignore is not None:
            inside |= value == self.ignore
        return bool(inside.all())


def tensors_in(tree: Any, name: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with the way to each: nested containers, mappings, dataclasses, plain objects.

    >>> [name for name, _ in tensors_in({"x": torch.ones(2), "more": [torch.ones(1)]})]
    ["batch['x']", "batch['more'][0]"]
    """
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    for key, item in _items(tree):
        yield from tensors_in(item, name + key)


def rebuild(tree: Any, values: Iterator[torch.Tensor]) -> Any:
    """Return a copy of a batch with its tensors replaced in order."""
    if isinstance(tree, torch.Tensor):
        return next(values)
    items = list(_items(tree))
    if not items:
        return tree
    made = [rebuild(item, values) for _, item in items]
    if isinstance(tree, tuple):
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    if isinstance(tree, list):
        return made
    if isinstance(tree, MutableMapping):
        other = copy.copy(tree)
        for key, value in zip(tree, made, strict=True):
            other[key] = value
        return other
    other = copy.copy(tree)
    for (key, _), value in zip(items, made, strict=True):
        object.__setattr__(other, key[1:], value)
    return other


def _items(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, tuple | list):
        return [(f"[{i}]", item) for i, item in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", item) for key, item in tree.items()]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{f.name}", getattr(tree, f.name)) for f in fields(tree)]
    if isinstance(tree, str | bytes | int | float | type | torch.nn.Module) or tree is None or callable(tree) or not hasattr(tree, "__dict__"):
        return []
    return [(f".{key}", item) for key, item in vars(tree).items()]


def observed(name: str, value: torch.Tensor, bounds: tuple[float, float] | None = None) -> Input:
    """Describe a tensor by its dtype, its values and its name alone; its use may say more."""
    role = _role(name, value)
    if role is Role.OTHER:
        return Input(name, value, role, -float("inf"), float("inf"))
    finite = value[torch.isfinite(value)] if value.is_floating_point() else value
    low, high = float(finite.min()), float(finite.max())
    if role is Role.MASK:
        low, high = (min(low, 0.0), max(high, 1.0)) if not value.is_floating_point() or finite.numel() == value.numel() else (-float("inf"), high)
    if bounds is not None and role is not Role.MASK:
        return Input(name, value, role, float(bounds[0]), float(bounds[1]), stated=True)
    if role is Role.FLOATS:
        low, high = _widened(low, high)
    return Input(name, value, role, low, high)


def _role(name: str, value: torch.Tensor) -> Role:
    if value.layout is not torch.strided or value.is_nested or value.is_complex() or value.is_quantized or not value.numel():
        return Role.OTHER
    if value.dtype is torch.bool:
        return Role.MASK
    if value.is_floating_point():
        finite = torch.isfinite(value)
        if not bool(finite.all()):
            return Role.MASK if is_mask_like(value) else Role.OTHER if not bool(finite.any()) else Role.FLOATS
        return Role.MASK if "mask" in name.lower() and bool(((value == 0) | (value == 1)).all()) else Role.FLOATS
    words = name.lower()
    if "mask" in words and bool(((value == 0) | (value == 1)).all()):
        return Role.MASK
    return Role.LENGTHS if "len" in words and value.dim() <= 1 else Role.INTEGERS


def _widened(low: float, high: float) -> tuple[float, float]:
    """Widen an observed range modestly; what was never negative stays so, what lies in [0, 1] stays there.

    >>> _widened(-2.0, 2.0), _widened(0.0, 4.0), _widened(0.1, 0.9)
    ((-3.0, 3.0), (0.0, 5.0), (0.0, 1.0))
    """
    more = WIDER * ((high - low) or max(abs(high), 1.0))
    floor, ceiling = low - more, high + more
    if low >= 0:
        floor = max(floor, 0.0)
        ceiling = min(ceiling, 1.0) if high <= 1 else ceiling
    if high <= 0:
        ceiling = min(ceiling, 0.0)
    return floor, ceiling
