"""A state that is in memory, given as a checkpoint: state dicts, modules, optimizers, and whatever holds tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whynan.forensics.checkpoints.contents import Contents, Entry, Scalar
from whynan.forensics.checkpoints.sources import PIECE

if TYPE_CHECKING:
    import torch


def from_state(state: object) -> Contents:
    """Give a state dict, module or optimizer the form of an opened checkpoint; nothing is copied but the piece being read.

    **Cost:** none until it is scanned; tensors on a device are then copied from it piece by piece.
    """
    from whynan.recovery.health import tensors_in
    from whynan.tripwire.values import parts

    entries: list[Entry] = []
    size = absent = 0
    for name, tensor in tensors_in(state):
        if tensor.device.type == "meta":
            absent += 1
            continue
        dense = [tensor.detach()] if tensor.is_quantized else parts(tensor.detach())
        for i, part in enumerate(dense):
            label = name if len(dense) == 1 else f"{name}.{i}"
            entries.append(Entry(label, str(part.dtype).removeprefix("torch."), tuple(part.shape), _Tensor(part)))
            size += part.numel() * part.element_size()
    notes = (f"{absent} tensor{'s' * (absent != 1)} on the meta device, without values: not looked at",) if absent else ()
    return Contents("state in memory", size, tuple(entries), dict(_plain(state)), notes)


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """The bytes of a tensor, through the host's memory."""

    tensor: torch.Tensor

    def __call__(self) -> Iterator[memoryview]:
        import torch

        whole = self.tensor.int_repr() if self.tensor.is_quantized else self.tensor
        if whole.is_complex():
            whole = torch.view_as_real(whole.resolve_conj())
        flat = whole.resolve_neg().reshape(-1)
        step = max(1, PIECE // max(1, flat.element_size()))
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].cpu().contiguous()
            # numpy may be absent, and knows neither bfloat16 nor float8
            yield memoryview((ctypes.c_char * (piece.numel() * piece.element_size())).from_address(piece.data_ptr())).cast("B")


def _plain(state: object, name: str = "", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, Scalar]]:
    if hasattr(state, "state_dict") and not isinstance(state, Mapping):
        state = state.state_dict()
    if state is None or isinstance(state, bool | int | float | str):
        if name:
            yield name, state
        return
    if id(state) in above:
        return
    children = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in children:
        yield from _plain(value, f"{name}.{key}" if name else str(key), above | {id(state)})
