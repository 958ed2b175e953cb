"""The memory that tensors live in: who shares it, who covers it, and what it held when a step began."""

from __future__ import annotations

import weakref

import torch

from whynan.capsule.replay import Program
from whynan.capsule.tape.arguments import leaves
from whynan.capsule.tape.entries import Outside
from whynan.capsule.tape.facts import is_leaf
from whynan.tripwire.values import parts, plain

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the memory a tensor lives in; views share it."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):  # a wrapper (DTensor) has no memory of its own
        tensor = next(iter(parts(tensor)), tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of the memory it lives in, each value once."""
    return plain(tensor) is tensor and 0 not in tensor.stride() and not is_part(tensor)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers less than the memory it lives in."""
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False


def weak_storage(tensor: torch.Tensor) -> object:
    """Hold a storage weakly: its memory can be freed, its identity cannot be reused."""
    try:
        inner = next(iter(parts(tensor)), tensor) if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__") else tensor
        return torch.multiprocessing.reductions.StorageWeakRef(inner.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return weakref.ref(tensor)


def roles_of(program: Program, leaves_: dict[int, tuple[str, str]] | None = None) -> dict[int, tuple[str, str]]:
    """Name the memory a step starts from: parameters, buffers, and what was handed in from outside. A weight whose infinities are meant is a constant."""
    roles: dict[int, tuple[str, str]] = {}
    for entry in program.entries:
        for leaf in leaves((entry.args, entry.kwargs)):
            if isinstance(leaf, Outside):
                # weights of torch.func are plain values that one step hands to the next
                weight = is_weight(leaf, program) or (leaf.carried and entry.kind == "derivative")
                role = "parameter" if weight else "input"
                for tensor in (leaf.tensor, leaf.value()):
                    roles.setdefault(storage_key(tensor), (role, ""))
            else:
                for tensor in _object_tensors(leaf):
                    roles.setdefault(storage_key(tensor), ("input", ""))
    for root in program.roots:
        for name, buffer in root.named_buffers():
            roles[storage_key(buffer)] = ("buffer", name)
        for name, parameter in root.named_parameters():
            roles[storage_key(parameter)] = ("parameter", name)
    for meant in program.recorder.beside.infinities.unchanged():
        roles[storage_key(meant)] = ("constant", roles.get(storage_key(meant), ("", ""))[1])
    roles.update(leaves_ or {})
    return roles


def is_weight(outside: Outside, program: Program) -> bool:
    """Whether a tensor from outside is trained; one that only has a gradient is an input."""
    tensor = outside.tensor
    return tensor.requires_grad and is_leaf(tensor) and not outside.handed and program.recorder.beside.is_trained(tensor)


def _object_tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__") or callable(value):
        return []
    return [v for v in vars(value).values() if isinstance(v, torch.Tensor)]
