"""What each module of a replayed step gave: its largest value, and whether the damage reached it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.tape.facts import is_leaf
from whynan.capsule.tape.nested import tensors_of
from whynan.records import ModuleState
from whynan.tripwire.values import damage_of, damaged, largest_of, plain

MOST = 300  # modules of one incident
_ROOM = 50_000_000  # values of a damaged tensor of which a copy is made to find its largest finite one


def paths_of(roots: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """Name modules by their path in the largest model they are part of: an encoder called by itself is still `model.encoder`."""
    names: dict[torch.nn.Module, str] = {}
    for root in sorted(roots, key=lambda r: -sum(1 for _ in r.modules())):
        for name, module in root.named_modules():
            names.setdefault(module, ".".join(part for part in name.split(".") if part != "_orig_mod"))  # torch.compile's own wrapper
    return names


class Outputs:
    """What each module gave and what its weights are, by its path in the model.

    Cost: one reduction per result, in a replay only. Where to read a number means to wait for a device, those of results that are
    known to be finite are read in one go.
    """

    def __init__(self, found: dict[str, ModuleState]) -> None:
        self._found = found
        self._unread: list[tuple[str, str, torch.Tensor]] = []  # module, dtype, largest magnitude

    def look(self, name: str, module: torch.nn.Module, output: Any, finite: Callable[[torch.Tensor], bool]) -> None:
        """Note what a module gave back."""
        self._found.setdefault(name, ModuleState(name, type(module).__name__))
        for tensor in tensors_of(output):
            if not tensor.is_floating_point():
                continue
            if finite(tensor) and tensor.numel() and tensor.element_size() > 1:
                self._unread.append((name, _dtype(tensor), torch.linalg.vector_norm(tensor.detach(), torch.inf)))
            else:
                self._note(name, _dtype(tensor), *seen(tensor))

    def _note(self, name: str, dtype: str, size: float | None, bad: bool) -> None:
        before = self._found[name]
        bigger = size is not None and (before.largest is None or size >= before.largest)
        self._found[name] = replace(
            before,
            dtype=dtype if bigger or not before.dtype else before.dtype,
            largest=size if bigger else before.largest,
            bad_output=before.bad_output or bad,
        )

    def read(self) -> None:
        """Read what is unread."""
        for (name, dtype, _), size in zip(self._unread, largest_of([size for *_, size in self._unread]), strict=True):
            self._note(name, dtype, size, False)
        self._unread.clear()

    def weights(self, roots: Iterable[torch.nn.Module]) -> None:
        """Note the largest weight of each module, and whether its weights and gradients are finite."""
        own = {name: [p for p in module.parameters(recurse=False) if p.is_floating_point()] for module, name in paths_of(roots).items()}
        kinds = {name: type(module).__name__ for module, name in paths_of(roots).items()}
        every = [p for weights in own.values() for p in weights]
        sizes = dict(zip(map(id, every), largest_of([p.detach() for p in every]), strict=True))
        trained = [p for p in every if is_leaf(p) and p.grad is not None]
        slopes = dict(zip(map(id, trained), damaged([p.grad for p in trained if p.grad is not None]), strict=True))
        for name, weights in own.items():
            if weights and (name in self._found or len(self._found) < MOST):
                looked = [(size, False, w) if (size := sizes[id(w)]) is not None and math.isfinite(size) else (*seen(w), w) for w in weights]
                top = max(((size, w) for size, _, w in looked if size is not None), key=lambda pair: pair[0], default=None)
                self._found[name] = replace(
                    self._found.get(name) or ModuleState(name, kinds[name]),
                    weight_dtype=_dtype(top[1]) if top is not None else "",
                    weight_largest=top[0] if top is not None else None,
                    bad_weight=any(bad for _, bad, _ in looked),
                    bad_gradient=any(slopes.get(id(w), False) for w in weights),
                )


def seen(tensor: torch.Tensor) -> tuple[float | None, bool]:
    """Return the largest finite magnitude in a tensor (None where there is none or it cannot be read), and whether it is damaged."""
    try:
        dense = plain(tensor.detach())
        if dense is None:
            return None, bool(damage_of(tensor.detach()))
        if not dense.numel() or dense.device.type == "meta":
            return None, False
        if dense.element_size() == 1:
            dense = dense.float()
        size = float(torch.linalg.vector_norm(dense, torch.inf))
        if math.isfinite(size):
            return size, False
        finite = dense[torch.isfinite(dense)] if dense.numel() <= _ROOM else dense[:0]
        return float(finite.abs().max()) if finite.numel() else None, True
    except (RuntimeError, NotImplementedError, TypeError, MemoryError):
        return None, bool(damage_of(tensor.detach()))


def largest(tensor: torch.Tensor) -> float | None:
    """Return the largest finite magnitude in a tensor; None where there is none or it cannot be read."""
    return seen(tensor)[0]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
