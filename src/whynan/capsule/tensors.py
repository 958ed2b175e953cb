"""The tensors of a capsule: what is stored of each, and which go first when it gets too large."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from whynan.capsule.tape.facts import is_readable
from whynan.records import Json


class Need(IntEnum):
    """What a tensor is stored for; the largest number is dropped first."""

    STEP = 0  # the calls of the step: batch, weights, buffers
    STATE = 1  # gradients and the state of the optimizer that failed
    OTHERS = 2  # other optimizers and models of the run, which the step did not touch


@dataclass(slots=True)
class Stored:
    """One tensor to be written."""

    value: torch.Tensor
    need: Need
    node: dict[str, Any]


class Tensors:
    """Collects tensors under short keys. Nothing is copied before `take`."""

    def __init__(self) -> None:
        self.need = Need.STEP
        self.with_gradients = False
        self.stored: dict[str, Stored] = {}
        self.unwritten: Any = lambda tensor: False
        self.made_at: Any = lambda tensor: None  # where the memory of one was asked for
        self.meant: Any = lambda tensor: False  # whether its infinities are

    def describe(self, tensor: torch.Tensor) -> dict[str, Json]:
        """Return the node of a tensor; raises `Unable` for kinds that safetensors cannot hold."""
        from whynan.capsule.objects import Unable

        node: dict[str, Json] = {"is": "tensor", "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
        node["requires_grad"] = bool(tensor.requires_grad)
        node["leaf"] = bool(tensor.is_leaf)
        node["kind"] = type(tensor).__name__ if type(tensor) in (torch.nn.Parameter, torch.nn.Buffer) else "Tensor"
        if torch.nn.parameter.is_lazy(tensor):
            raise Unable("a lazy parameter without values")
        if tensor.is_sparse:
            coalesced = tensor.detach().coalesce()
            node["sparse"] = [self._store(coalesced.indices(), node), self._store(coalesced.values(), node)]
            return node
        if not is_readable(tensor):
            raise Unable(f"a tensor of layout {tensor.layout} on {tensor.device}")
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Unable(f"a {type(tensor).__name__}, which computes in Python")
        node["stride"] = list(tensor.stride())
        node["unwritten"], node["meant"] = bool(self.unwritten(tensor)), bool(self.meant(tensor))
        if node["unwritten"]:
            node["made_at"] = self.made_at(tensor)
        node["data"] = self._store(_narrowed(tensor.detach()), node)
        return node

    def _store(self, tensor: torch.Tensor, node: dict[str, Json]) -> str:
        key = f"t{len(self.stored)}"
        self.stored[key] = Stored(tensor, self.need, node)
        return key

    def size(self, up_to: Need) -> int:
        """Return the bytes of all tensors needed for a purpose or a more important one."""
        return sum(s.value.numel() * s.value.element_size() for s in self.stored.values() if s.need <= up_to)

    def take(self, up_to: Need) -> dict[str, torch.Tensor]:
        """Copy the tensors to the CPU, as safetensors wants them: contiguous, each in memory of its own."""
        return {key: _portable(stored.value) for key, stored in self.stored.items() if stored.need <= up_to}


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that repeats its values (`expand`) keep them once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        return plain.clone(memory_format=torch.contiguous_format)
