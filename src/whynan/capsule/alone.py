"""Let one rank replay a model that is spread over several: whole weights, no collectives of the wrappers.

All ranks enter together (putting sharded weights together is a collective) and then replay each for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm


class _OwnStatistics(SyncBatchNorm):
    """A synchronised BatchNorm that looks at this rank's samples only."""

    forward = _BatchNorm.forward


_WRAPPING = ("torch.distributed.fsdp", "torch.distributed._composable")  # whose hooks gather weights, and hang reducers on results


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
    return not any(map(_is_managed, modules)) and any(is_sharded(p) for root in roots for p in root.parameters())


def _is_managed(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` has made a class of its own of a module's; by the class, for its metaclass may give it another `__module__`."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule)


def _with_state() -> list[torch.nn.Module]:
    """Return all modules that `fully_shard` or `replicate` was called on, also those in no other module's tree (in a list, behind a function)."""
    states = sys.modules.get("torch.distributed._composable_state")
    return list(states._module_state_mapping) if states is not None else []


def in_flat_shards(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules among these that `FullyShardedDataParallel` wraps: it keeps its weights in parts of flat tensors of its own."""
    library = sys.modules.get("torch.distributed.fsdp")
    return [m for m in modules if library is not None and isinstance(m, library.FullyShardedDataParallel)]


def is_of_wrapper(hook: Any) -> bool:
    """Whether a hook belongs to `fully_shard` or `replicate`: a method of their state, or a function where modules are sharded as a group."""
    owner = type(getattr(hook, "__self__", None)).__module__
    return owner.startswith(_WRAPPING) or str(getattr(hook, "__module__", "")).startswith(_WRAPPING)


def elsewhere(parameters: list[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the modules of `fully_shard` that hold some of these parameters, also those that no module that is called holds."""
    wanted = set(map(id, parameters))
    return [m for m in _with_state() if _is_managed(m) and any(id(p) in wanted for p in m.parameters())]


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
def unmanaged(modules: list[torch.nn.Module]) -> Iterator[str]:
    """Take the hooks of `fully_shard` off, here and wherever else they are; yield what makes a replay inexact, or nothing."""
    undo: list[Any] = []
    note = ""
    try:
        for module in dict.fromkeys([*(part for m in modules for part in m.modules()), *_with_state()]):
            note = _take_off(module, undo) or note
        yield note
    finally:
        for action in reversed(undo):
            action()


@contextmanager
def whole(roots: list[torch.nn.Module]) -> Iterator[str]:
    """Put sharded weights together and take the hooks of `fully_shard` off; yield what makes a replay inexact, or nothing.

    Memory: the whole model once more on every rank.
    """
    undo: list[Any] = []
    made: dict[int, torch.nn.Parameter] = {}
    with unmanaged(roots) as note:
        try:
            for module in dict.fromkeys(m for root in roots for m in root.modules()):
                _put_together(module, undo, made)
            yield note
        finally:
            for action in reversed(undo):
                action()


def _put_together(module: torch.nn.Module, undo: list[Any], made: dict[int, torch.nn.Parameter]) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is None or not hasattr(parameter, "full_tensor"):
            continue
        if id(parameter) not in made:
            full = parameter.full_tensor().detach()
            made[id(parameter)] = torch.nn.Parameter(full.clone(), parameter.requires_grad)
        module._parameters[name] = made[id(parameter)]
        undo.append(lambda n=name, p=parameter: module._parameters.__setitem__(n, p))


def _take_off(module: torch.nn.Module, undo: list[Any]) -> str:
    note = ""
    cls = type(module)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        saved = list(hooks.items())
        for key, hook in saved:
            if is_of_wrapper(hook):
                del hooks[key]
        if len(hooks) < len(saved):
            undo.append(lambda h=hooks, s=saved: (h.clear(), h.update(s)))
    if _is_managed(module):
        library = sys.modules["torch.distributed.fsdp"]
        note = _mixed(module._get_fsdp_state())  # type: ignore[operator]
        module.__class__ = next(base for base in cls.__mro__ if not issubclass(base, library.FSDPModule))
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
