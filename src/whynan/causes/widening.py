"""The failing step in another number type.

In float64, where that is finite, its gradient is the truth that a remedy is held against. With bfloat16 in the place of
float16 it shows whether the range was the trouble.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.replay import Program
from whynan.capsule.sorts import Sort, sort_of
from whynan.capsule.tape.entries import Outside

LARGEST = 50_000_000  # parameters; above it one step in float64 takes longer than all other experiments together
SHORT = 20_000_000  # above it a replay takes long enough to do without the experiments that only add to a proof
Table = dict[torch.dtype, torch.dtype]
WIDE: Table = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
BRAIN: Table = {torch.float16: torch.bfloat16}
_CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}


class Converted(TorchFunctionMode):
    """Hands every torch function other floating-point types, by a table; what it makes anew has them too."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cast = kwargs or {}, _CASTS.get(func)
        if cast in self.table:
            return args[0].to(self.table[cast])
        if self.table is WIDE and sort_of(func) is Sort.RANDOM and not _is_recurrent(func):  # float64 would draw other numbers
            return self._other(func(*map(_single, args), **{k: _single(v) for k, v in kwargs.items()}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "backward") or name.startswith("_"):
            return func(*args, **kwargs)
        writes = name.endswith("_") or kwargs.get("out") is not None
        kept, rest = (args[:1], args[1:]) if writes else ((), args)
        result = func(*kept, *map(self._other, rest), **{k: self._other(v) for k, v in kwargs.items()})
        return result if writes else self._other(result)

    def _other(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.table[value.dtype]) if value.dtype in self.table else value
        if isinstance(value, torch.dtype):
            return self.table.get(value, value)
        if type(value) in (list, tuple):
            return type(value)(map(self._other, value))
        return value


def _is_recurrent(func: Any) -> bool:
    return getattr(func, "__name__", "").startswith(("lstm", "gru", "rnn_"))  # draws only for its dropout


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


@contextlib.contextmanager
def converted(program: Program, table: Table) -> Iterator[None]:
    """Let a replay see weights, buffers and batch in other types; `program.leaves` are the stand-ins meanwhile.

    The weights themselves are not touched: a change of their type would cut the hooks that data parallelism hangs on them.
    Enter it inside `program.still()`.
    """
    modules = list({id(m): m for root in program.roots for m in root.modules()}.values())
    weights = {id(p): p for p in (*program.leaves, *(p for m in modules for p in m._parameters.values() if p is not None))}
    stand = {key: _stand_in(p, table) for key, p in weights.items() if p.dtype in table}
    homes = [(m, n, p) for m in modules for n, p in m._parameters.items() if p is not None and id(p) in stand]
    buffers = [(m._buffers, n, b) for m in modules for n, b in m._buffers.items() if b is not None and b.dtype in table]
    held = {id(b): b.to(table[b.dtype]) for _, _, b in buffers}  # one for each: what the step writes into it the module must read
    read = {id(leaf): leaf for e in program.entries for leaf in e.reads if isinstance(leaf, Outside)}
    batch = [(leaf, leaf.saved) for leaf in read.values() if leaf.value().dtype in table and (id(leaf.tensor) in stand or not leaf.tensor.requires_grad)]
    leaves = program.leaves
    try:
        for leaf, _ in batch:
            other = stand.get(id(leaf.tensor)) if id(leaf.tensor) in stand or leaf.saved is not None else held.get(id(leaf.tensor))
            leaf.saved = leaf.value().to(table[leaf.value().dtype]) if other is None else other
        for owner, name, parameter in homes:
            _put(owner, name, stand[id(parameter)])
        for home, name, buffer in buffers:
            home[name] = held[id(buffer)]
        program.leaves = [stand.get(id(leaf), leaf) for leaf in leaves]
        with _autocast_to(table), Converted(table):
            yield
    finally:
        program.leaves = leaves
        for home, name, buffer in buffers:
            home[name] = buffer
        for owner, name, parameter in homes:
            _put(owner, name, parameter)
        for leaf, saved in batch:
            leaf.saved = saved


def _stand_in(weight: torch.Tensor, table: Table) -> torch.Tensor:
    if weight._backward_hooks:
        raise TypeError("a weight has a hook of its own, which a copy would not have")
    return torch.nn.Parameter(weight.detach().to(table[weight.dtype]), requires_grad=weight.requires_grad)


def _put(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> None:
    if isinstance(module, torch.nn.RNNBase):
        setattr(module, name, parameter)  # it keeps a second list of them
    else:
        module._parameters[name] = parameter  # type: ignore[assignment]


@contextlib.contextmanager
def _autocast_to(table: Table) -> Iterator[None]:
    """Let regions of autocast in this thread use another type; float64 is never cast by them."""
    original, here = torch.set_autocast_dtype, get_ident()
    if table is WIDE:
        yield
        return
    torch.set_autocast_dtype = lambda device_type, dtype: original(device_type, table.get(dtype, dtype) if get_ident() == here else dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype = original


def size_of(program: Program) -> int:
    """Count the numbers that gradients end in."""
    return sum(leaf.numel() for leaf in program.leaves)
