"""Let one rank replay a model that is spread over several: whole weights, no collectives of the wrappers.

All ranks enter together (putting sharded weights together is a collective) and then replay each for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm


class _OwnStatistics(SyncBatchNorm):
    """A synchronised BatchNorm that looks at this rank's samples only."""

    forward = _BatchNorm.forward


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter is spread over several ranks."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.size() > 1


def spread_operations(roots: list[torch.nn.Module]) -> bool:
    """Whether single operations of a model run on several ranks (tensor parallel): no rank can replay those alone."""
    modules = [m for root in roots for m in root.modules()]
    hooks = (h for m in modules for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    if any(str(getattr(h, "__module__", "")).startswith("torch.distributed.tensor") for h in hooks):
        return True
    managed = any(type(m).__module__.startswith("torch.distributed.fsdp") for m in modules)
    return not managed and any(is_sharded(p) for root in roots for p in root.parameters())


@contextmanager
def unreplicated(roots: list[torch.nn.Module]) -> Iterator[None]:
    """Let data-parallel wrappers below these modules call the module inside them, without their collectives."""
    wrappers = [m for root in roots for m in root.modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel)]
    for wrapper in wrappers:
        wrapper.__dict__["forward"] = wrapper.module.__call__
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.__dict__.pop("forward", None)


@contextmanager
def whole(roots: list[torch.nn.Module]) -> Iterator[str]:
    """Put sharded weights together and take the hooks of `fully_shard` off; yield what makes a replay inexact, or nothing.

    Memory: the whole model once more on every rank.
    """
    modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
    undo: list[Any] = []
    made: dict[int, torch.nn.Parameter] = {}
    note = ""
    try:
        for module in modules:
            note = _take_off(module, undo) or note
        for module in modules:
            _put_together(module, undo, made)
        yield note
    finally:
        for action in reversed(undo):
            action()


def _put_together(module: torch.nn.Module, undo: list[Any], made: dict[int, torch.nn.Parameter]) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is None or not is_sharded(parameter):
            continue
        if id(parameter) not in made:
            full = parameter.full_tensor().detach()  # type: ignore[attr-defined]
            made[id(parameter)] = torch.nn.Parameter(full.clone(), parameter.requires_grad)
        module._parameters[name] = made[id(parameter)]
        undo.append(lambda n=name, p=parameter: module._parameters.__setitem__(n, p))


def _take_off(module: torch.nn.Module, undo: list[Any]) -> str:
    note = ""
    cls = type(module)
    if cls.__module__.startswith("torch.distributed.fsdp"):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            saved = list(hooks.items())
            for key, hook in saved:
                state = getattr(hook, "__self__", None)
                if type(state).__module__.startswith("torch.distributed.fsdp"):
                    del hooks[key]
                    note = note or _mixed(state)
            undo.append(lambda h=hooks, s=saved: (h.clear(), h.update(s)))
        module.__class__ = cls.__mro__[2]
        undo.append(lambda: setattr(module, "__class__", cls))
    elif isinstance(module, SyncBatchNorm):
        module.__class__ = _OwnStatistics
        undo.append(lambda: setattr(module, "__class__", cls))
        note = "synchronised BatchNorm was replayed with this rank's own statistics"
    return note


def _mixed(state: Any) -> str:
    policy = getattr(state, "_mp_policy", None)
    if policy is not None and (policy.param_dtype is not None or policy.output_dtype is not None):
        return "the model was replayed in the dtype of its weights, not in fully_shard's mixed precision"
    return ""
