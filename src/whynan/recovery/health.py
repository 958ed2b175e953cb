"""Is a state fit to be kept? Every tensor in it is looked at, however deep it lies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from whynan.records import count
from whynan.tripwire.values import damage_of, is_mask_like, parts, stats


class Role(StrEnum):
    """What is known of a tensor: it decides which infinities may be meant."""

    TRAINED = "trained"  # a weight or optimizer state: nothing but finite values is right
    BUFFER = "buffer"  # may be a mask, or a minimum that was never updated
    UNKNOWN = "unknown"  # from a bare state dict: may be a mask


@dataclass(frozen=True, slots=True)
class Hurt:
    """One tensor that is not fit to be kept.

    >>> str(Hurt("model.fc.weight", nan=12, inf=1))
    'model.fc.weight 12 nan, 1 inf'
    """

    name: str
    nan: int = 0
    inf: int = 0
    note: str = ""

    def __str__(self) -> str:
        counts = [f"{count(n)} {word}" for n, word in ((self.nan, "nan"), (self.inf, "inf")) if n]
        return f"{self.name} {self.note or ', '.join(counts)}"


def examine(state: object, roles: Mapping[str, Role] | None = None, allow: Sequence[str] = ()) -> tuple[Hurt, ...]:
    """Return the tensors of a state that hold NaN, infinities that are not meant, or no values at all.

    `roles` maps names, or the beginnings of names, to what is known of the tensors; `allow` holds patterns of names
    whose values are not looked at.

    >>> examine({"w": torch.tensor([1.0, torch.nan]), "mask": torch.tensor([0.0, -torch.inf])})
    (Hurt(name='w', nan=1, inf=0, note=''),)

    Cost: one reduction per tensor, and on an accelerator one wait for it.
    """
    known = roles or {}
    found = (_look(name, tensor, _role(name, known)) for name, tensor in tensors_in(state) if not any(fnmatchcase(name, p) for p in allow))
    return tuple(hurt for hurt in found if hurt is not None)


def describe(hurts: Sequence[Hurt], limit: int = 3) -> str:
    """Say what is wrong in one line.

    >>> describe([Hurt("w", nan=2), Hurt("b", inf=1)])
    '2 tensors not finite: w 2 nan; b 1 inf'
    """
    more = f"; and {len(hurts) - limit} more" if len(hurts) > limit else ""
    kind = "not finite" if any(h.nan or h.inf for h in hurts) else "without values"
    return f"{len(hurts)} tensor{'s' * (len(hurts) > 1)} {kind}: {'; '.join(map(str, hurts[:limit]))}{more}"


def roles_of(name: str, owner: object) -> dict[str, Role]:
    """Say what is known of the tensors in the state dict of an object stored under a name."""
    if isinstance(owner, torch.optim.Optimizer):
        return {f"{name}.": Role.TRAINED}
    if not isinstance(owner, torch.nn.Module):
        return {}
    roles = {f"{name}.{n}": Role.BUFFER for n, _ in owner.named_buffers(remove_duplicate=False)}
    trained = ((n, p) for n, p in owner.named_parameters(remove_duplicate=False))
    return roles | {f"{name}.{n}": Role.TRAINED if p.requires_grad else Role.BUFFER for n, p in trained}


def tensors_in(state: object, name: str = "", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of nested containers with its dotted name, and numpy's arrays as tensors; modules and optimizers count as their state dicts."""
    tensor = state if isinstance(state, torch.Tensor) else _of_array(state)
    if tensor is not None:
        yield name or "tensor", tensor
        return
    if isinstance(state, torch.nn.Module | torch.optim.Optimizer):
        state = state.state_dict()
    if id(state) in above:
        return
    inside = above | {id(state)}
    for key, value in _children(state):
        yield from tensors_in(value, f"{name}.{key}" if name else str(key), inside)


def _of_array(value: object) -> torch.Tensor | None:
    """Return the numbers of an array that may be not finite; those of kinds that torch has not got, as the widest it has."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind not in "fc":
        return None
    try:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    except (TypeError, ValueError):  # long doubles, another order of bytes, strides that go backwards
        return torch.from_numpy(value.astype("c16" if value.dtype.kind == "c" else "f8"))


def _children(state: object) -> Iterator[tuple[Any, object]]:
    if isinstance(state, Mapping):
        yield from state.items()
    elif isinstance(state, list | tuple | set | frozenset):
        yield from enumerate(state)


def _role(name: str, roles: Mapping[str, Role]) -> Role:
    return roles.get(name) or roles.get(name.split(".", 1)[0] + ".") or Role.UNKNOWN


def _look(name: str, tensor: torch.Tensor, role: Role) -> Hurt | None:
    if is_lazy(tensor):
        return Hurt(name, note="not initialised yet")
    tensor = tensor.detach()
    inner = parts(tensor)
    if any(p.device.type == "meta" and p.numel() for p in inner):
        return Hurt(name, note="on the meta device")
    bad = [p for p in inner if damage_of(p) and not _meant(p, role)]
    if not bad:
        return None
    seen = [stats(name, p) for p in bad]
    return Hurt(name, sum(s.nan for s in seen), sum(s.posinf + s.neginf for s in seen))


def _meant(part: torch.Tensor, role: Role) -> bool:
    """Whether the infinities of a tensor are put there on purpose, by its role and its values."""
    if role is Role.TRAINED or part.is_complex():
        return False
    wide = part.to(torch.float32) if part.element_size() == 1 else part
    return is_mask_like(wide) or (role is Role.BUFFER and bool((wide == torch.inf).all()))
