"""What each module of a replayed step gave: its largest value, and whether the damage reached it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.tape import is_leaf, tensors_of
from whynan.records import ModuleState
from whynan.tripwire.values import damage_of, plain

MOST = 300  # modules of one incident
_ROOM = 50_000_000  # values of a damaged tensor of which a copy is made to find its largest finite one


def paths_of(roots: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """Name modules by their path in the largest model they are part of: an encoder called by itself is still `model.encoder`."""
    names: dict[torch.nn.Module, str] = {}
    for root in sorted(roots, key=lambda r: -sum(1 for _ in r.modules())):
        for name, module in root.named_modules():
            names.setdefault(module, ".".join(part for part in name.split(".") if part != "_orig_mod"))  # torch.compile's own wrapper
    return names


def look_at_output(name: str, module: torch.nn.Module, output: Any, found: dict[str, ModuleState]) -> None:
    """Note what a module gave back. Cost: one reduction per module, in a replay only."""
    before = found.get(name) or ModuleState(name, type(module).__name__)
    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            size, bad = seen(tensor)
            bigger = size is not None and (before.largest is None or size >= before.largest)
            before = replace(
                before,
                dtype=_dtype(tensor) if bigger or not before.dtype else before.dtype,
                largest=size if bigger else before.largest,
                bad_output=before.bad_output or bad,
            )
    found[name] = before


def look_at_weights(roots: Iterable[torch.nn.Module], found: dict[str, ModuleState]) -> None:
    """Note the largest weight of each module, and whether its weights and gradients are finite."""
    for module, name in paths_of(roots).items():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if own and (name in found or len(found) < MOST):
            found[name] = _with_weights(found.get(name) or ModuleState(name, type(module).__name__), own)


def _with_weights(state: ModuleState, weights: list[torch.nn.Parameter]) -> ModuleState:
    found = [(*seen(w), w) for w in weights]
    top = max(((size, w) for size, _, w in found if size is not None), key=lambda pair: pair[0], default=None)
    return replace(
        state,
        weight_dtype=_dtype(top[1]) if top is not None else "",
        weight_largest=top[0] if top is not None else None,
        bad_weight=any(bad for _, bad, _ in found),
        bad_gradient=any(is_leaf(w) and w.grad is not None and bool(damage_of(w.grad)) for w in weights),
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
