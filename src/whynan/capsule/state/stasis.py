"""A replay leaves no trace: what it could disturb is taken before it, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from whynan.capsule.made import contents
from whynan.capsule.state.generators import States, put
from whynan.capsule.state.holdings import Mutable, can_change, frozen_state, holdings, put_back, write_back
from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.capsule.state.surroundings import Spot, taken, tensors_among
from whynan.capsule.state.surroundings import put as put_around
from whynan.capsule.tape.facts import is_memory, is_readable


class Stasis:
    """Everything a replay could disturb, put back on leaving: random state, gradients, buffers, attributes.

    >>> model = torch.nn.BatchNorm1d(2)
    >>> with Stasis([model], []):
    ...     _ = model(torch.randn(4, 2))
    >>> int(model.num_batches_tracked)
    0
    """

    def __init__(
        self,
        roots: list[torch.nn.Module],
        leaves: list[torch.Tensor],
        hooks: list[Any] | None = None,
        generators: States | None = None,
        around: Iterable[Spot] = (),
        kept: Iterable[Any] = (),
    ) -> None:
        self._roots = roots
        self._kept = list(kept)  # tensors and containers that are written to, wherever they stand now
        self._spots = around
        self._leaves = leaves
        self._own_hooks = hooks or []  # of the step's own tensors
        self._generators = generators or []

    def __enter__(self) -> Stasis:
        self._rng = take_rng(others=True)
        self._grads = [(leaf, leaf.grad) for leaf in self._leaves]
        modules = list(dict.fromkeys(m for root in self._roots for m in root.modules()))
        self._around = taken(self._spots)
        self._take_attributes(modules)
        self._take_tensors(modules)
        # a live autograd graph may have saved these: their version counters must not move
        held = (*(b for b, _ in self._buffers), *tensors_among(spot for spot, _ in self._around))
        self._versions = torch.autograd._unsafe_preserve_version_counter(held)  # type: ignore[attr-defined]
        self._versions.__enter__()
        after = [getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in self._leaves]
        self._hooks = [(h, dict(h)) for h in after if h]  # optimizers stepped inside backward would eat the gradients
        for live, _ in self._hooks:
            live.clear()
        for leaf in self._leaves:
            leaf.grad = None
        return self

    def _take_attributes(self, modules: list[torch.nn.Module]) -> None:
        """Keep the attributes of modules and weights, and what is in the containers among them and in those that hooks write to."""
        self._attributes = [(m, m.__dict__.copy()) for m in modules]
        self._lists = [Mutable(v) for _, d in self._attributes for v in holdings(d)]
        hooks = [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        hooks += [hook for leaf in self._leaves for hook in (getattr(leaf, "_backward_hooks", None) or {}).values()]
        self._lists += [Mutable(v) for v in _hook_holdings([*hooks, *self._own_hooks])]
        self._lists += [Mutable(v) for v in self._kept if not isinstance(v, torch.Tensor)]
        hung = {id(t): t for t in (*self._leaves, *(p for root in self._roots for p in root.parameters())) if t.__dict__}
        self._hung = [(t, t.__dict__.copy()) for t in hung.values()]  # what a program keeps on its weights (per-sample gradients)
        self._lists += [Mutable(v) for _, d in self._hung for v in holdings(d)]

    def _take_tensors(self, modules: list[torch.nn.Module]) -> None:
        """Keep the values of buffers and the like, and which buffers and parameters stand where."""
        homes = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
        homes.update((id(b), b) for root in self._roots for b in frozen_state(root))
        homes.update((id(t), t) for t in self._kept if isinstance(t, torch.Tensor))
        self._buffers = [(b, b.detach().clone()) for b in homes.values() if not is_lazy(b) and is_memory(b)]
        tables: list[dict[str, Any]] = [table for m in modules for table in (m._buffers, m._parameters) if isinstance(table, dict)]  # else scripted
        self._homes = [(table, dict(table)) for table in tables]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad(), ExitStack() as later:  # the last comes first; what cannot be put back does not keep the others from it
            for item in self._lists:
                later.callback(item.restore)
            later.callback(self._put_tables_back)
            later.callback(self._versions.__exit__)
            later.callback(put_around, self._around)
            for buffer, copy in self._buffers:
                later.callback(write_back, copy, buffer)
            later.callback(self._put_gradients_back)
            later.callback(put, self._generators)
            later.callback(put_rng, self._rng)

    def _put_gradients_back(self) -> None:
        for live, saved in self._hooks:
            live.update(saved)
        for leaf, grad in self._grads:
            leaf.grad = grad

    def _put_tables_back(self) -> None:
        for home, tensors in self._homes:
            home.update(tensors)
        for module, attributes in self._attributes:
            put_back(module, attributes)
        for tensor, attributes in self._hung:
            tensor.__dict__.clear()
            tensor.__dict__.update(attributes)


@contextmanager
def in_own_memory(roots: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have weights stand in their own memory in the end: a pass may set one by its `.data` (an initialisation by the first batch)."""
    own = [(p, p.detach()) for root in roots for p in root.parameters() if type(p) is torch.nn.Parameter and is_readable(p)]
    try:
        yield
    finally:
        for weight, memory in own:
            if weight.data_ptr() != memory.data_ptr():
                weight.data = memory


def _hook_holdings(hooks: list[Any]) -> list[Any]:
    """Return the containers that hooks write to: in their closures, globals they name, or their object."""
    found: dict[int, Any] = {}
    for hook in hooks:
        plain = getattr(hook, "__wrapped__", hook)
        function = getattr(plain, "__func__", plain)
        code = getattr(function, "__code__", None)
        cells = [contents(c) for c in getattr(function, "__closure__", None) or ()]
        named = [function.__globals__[n] for n in code.co_names if n in function.__globals__] if code is not None else []
        owner = getattr(plain, "__self__", None)
        own = list(vars(owner).values()) if owner is not None and hasattr(owner, "__dict__") and not isinstance(owner, torch.nn.Module) else []
        found.update((id(v), v) for v in [*cells, *named, *own] if type(v) is not torch.Tensor and can_change(v))
    return list(found.values())
