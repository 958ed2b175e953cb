"""The failing step in another number type.

In float64, where that is finite, its gradient is the truth that a remedy is held against. With bfloat16 in the place of
float16 it shows whether the range was the trouble.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from whynan.capsule.recorder import Sort, sort_of
from whynan.capsule.replay import Program
from whynan.capsule.tape import Outside

LARGEST = 50_000_000  # parameters; above it one step in float64 takes longer than all other experiments together
Table = dict[torch.dtype, torch.dtype]
WIDE: Table = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
BRAIN: Table = {torch.float16: torch.bfloat16}
_CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}


class Converted(TorchFunctionMode):
    """Hands every torch function other floating-point types, by a table."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cast = kwargs or {}, _CASTS.get(func)
        if cast in self.table:
            return args[0].to(self.table[cast])
        if self.table is WIDE and sort_of(func) is Sort.RANDOM:
            return self._drawn(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "backward") or name.startswith("_"):
            return func(*args, **kwargs)
        writes = name.endswith("_") or kwargs.get("out") is not None
        kept, rest = (args[:1], args[1:]) if writes else ((), args)
        return func(*kept, *map(self._other, rest), **{k: self._other(v) for k, v in kwargs.items()})

    def _other(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.table[value.dtype]) if value.dtype in self.table else value
        if isinstance(value, torch.dtype):
            return self.table.get(value, value)
        if type(value) in (list, tuple):
            return type(value)(map(self._other, value))
        return value

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw in float32 and widen what was drawn: in float64 the same generator gives other numbers."""
        torch.set_default_dtype(torch.float32)
        try:
            drawn = func(*map(_single, args), **{k: _single(v) for k, v in kwargs.items()})
        finally:
            torch.set_default_dtype(torch.float64)
        return self._other(drawn)


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


@contextlib.contextmanager
def converted(program: Program, table: Table) -> Iterator[None]:
    """Give weights, buffers and batch other types for the time being. Enter it inside `program.still()`."""
    weights = {id(p): p for p in (*program.leaves, *(p for root in program.roots for p in root.parameters()))}
    changed = [(p, p.data) for p in weights.values() if p.dtype in table]
    homes = [(m._buffers, n, b) for root in program.roots for m in root.modules() for n, b in m._buffers.items() if b is not None and b.dtype in table]
    read = {id(leaf): leaf for e in program.entries for leaf in e.reads if isinstance(leaf, Outside)}
    batch = [(leaf, leaf.saved) for leaf in read.values() if not leaf.tensor.requires_grad and leaf.value().dtype in table]
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(table.get(usual, usual))
        for parameter, data in changed:
            parameter.data = data.to(table[data.dtype])
        for buffers, name, buffer in homes:
            buffers[name] = buffer.to(table[buffer.dtype])
        for leaf, _ in batch:
            leaf.saved = leaf.value().to(table[leaf.value().dtype])
        with _autocast_to(table), Converted(table):
            yield
    finally:
        torch.set_default_dtype(usual)
        for leaf, saved in batch:
            leaf.saved = saved
        for buffers, name, buffer in homes:
            buffers[name] = buffer
        for parameter, data in changed:
            parameter.grad = None  # of another type than the weight will have; `still` puts the old one back
            parameter.data = data


@contextlib.contextmanager
def _autocast_to(table: Table) -> Iterator[None]:
    """Let regions of autocast use another type; float64 is never cast by them."""
    original = torch.set_autocast_dtype
    if table is WIDE:
        yield
        return
    torch.set_autocast_dtype = lambda device_type, dtype: original(device_type, table.get(dtype, dtype))
    try:
        yield
    finally:
        torch.set_autocast_dtype = original


def size_of(program: Program) -> int:
    """Count the numbers that gradients end in."""
    return sum(leaf.numel() for leaf in program.leaves)


def is_hooked(program: Program) -> bool:
    """Whether somebody has hooks where the gradients of weights are added up, as DDP has: a weight of another type would lose them for good.

    Cost: one walk through all objects of Python, some ten milliseconds.
    """
    modules = (m for root in program.roots for m in root.modules())
    if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in modules):
        return True
    nodes = [get_gradient_edge(leaf).node for leaf in program.leaves if leaf.requires_grad and leaf.is_leaf]
    return any(holder is not nodes for holder in gc.get_referrers(*nodes))  # whoever put a hook there must keep the node
