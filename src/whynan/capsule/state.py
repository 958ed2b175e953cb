"""Module state that a forward pass changes: buffers and plain attributes, kept from the beginning of a step.

A bad forward pass poisons BatchNorm's running statistics whether the step is skipped or not, so the values from before
it must be at hand. Cost: a version check per buffer, one fused copy of the buffers that really change, and a shallow
copy of the attribute dictionary of each submodule that changes any.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

_OWN_KEYS = frozenset({"_parameters", "_buffers", "_modules"})


class ModuleState:
    """The state of one root module at the beginning of the current step."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # id(buffer): buffer, copy, version
        self._homes: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        self._attributes: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._modules = list(root.modules())
        self._busy = self._modules
        self._calls = 0
        self.changing = False
        self._resnapshot()

    def begin(self) -> None:
        """Take the state before the first call of a step."""
        self._calls += 1
        self._copy_attributes()
        stale_buffers, stale_copies = [], []
        for key, (buffer, copy, version) in self._copies.items():
            if buffer._version != version:
                stale_buffers.append(buffer)
                stale_copies.append(copy)
                self._copies[key] = (buffer, copy, buffer._version)
        if stale_buffers:
            self.changing = True
            with torch.no_grad():
                torch._foreach_copy_(stale_copies, stale_buffers)
        if any(m._buffers.get(name) is not buffer for m, name, buffer in self._homes):
            self._resnapshot()

    def _resnapshot(self) -> None:
        root = self._root()
        assert root is not None
        self._modules = list(root.modules())
        self._homes = [(m, n, b) for m in self._modules for n, b in m._buffers.items() if b is not None]
        with torch.no_grad():
            self._copies = {id(b): (b, b.detach().clone(), b._version) for _, _, b in self._homes if not b.is_inference()}

    def _copy_attributes(self) -> None:
        # after a few steps only the submodules that were seen to change an attribute are copied
        if self._calls % 64 == 4:
            before = self._attributes
            self._busy = [m for m, old in before if _differs(m.__dict__, old)] if len(before) == len(self._modules) else self._busy
        elif self._calls % 64 == 2:
            self._busy = self._modules
        self._attributes = [(m, m.__dict__.copy()) for m in self._busy]

    def changed_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the floating-point buffers written since the step began, with their names."""
        root = self._root()
        changed = {k for k, (b, _, version) in self._copies.items() if b._version != version and b.is_floating_point()}
        if not changed or root is None:
            return []
        self.changing = True
        return [(name, b) for name, b in root.named_buffers() if id(b) in changed]

    def rewind(self) -> None:
        """Put buffers and attributes back to the beginning of the step, bit for bit."""
        with torch.no_grad():
            for key, (buffer, copy, version) in self._copies.items():
                if buffer._version != version:
                    buffer.copy_(copy)
                    self._copies[key] = (buffer, copy, buffer._version)
            for module, name, buffer in self._homes:
                module._buffers[name] = buffer
        for module, attributes in self._attributes:
            _put_back(module, attributes)


    def replay_from(self) -> None:
        """Load the state of the beginning of the step for a replay; the caller puts the present back (`Stasis`)."""
        with torch.no_grad():
            for buffer, copy, version in self._copies.values():
                if buffer._version != version:
                    buffer.copy_(copy)
        for module, attributes in self._attributes:
            _put_back(module, attributes)


def _differs(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) != len(before) or any(now.get(k) is not v for k, v in before.items())


def _put_back(module: torch.nn.Module, attributes: dict[str, Any]) -> None:
    current = module.__dict__
    for key in [k for k in current if k not in attributes]:
        del current[key]
    current.update(attributes)


class Stasis:
    """Everything a replay could disturb, put back on leaving: random state, gradients, buffers, attributes.

    >>> model = torch.nn.BatchNorm1d(2)
    >>> with Stasis([model], []):
    ...     _ = model(torch.randn(4, 2))
    >>> int(model.num_batches_tracked)
    0
    """

    def __init__(self, roots: list[torch.nn.Module], leaves: list[torch.Tensor]) -> None:
        self._roots = roots
        self._leaves = leaves

    def __enter__(self) -> Stasis:
        self._rng = take_rng()
        self._grads = [(leaf, leaf.grad) for leaf in self._leaves]
        modules = list(dict.fromkeys(m for root in self._roots for m in root.modules()))
        self._attributes = [(m, m.__dict__.copy()) for m in modules]
        self._lists = [_Mutable(v) for _, d in self._attributes for k, v in d.items() if k not in _OWN_KEYS and is_mutable(v)]
        homes = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
        self._buffers = [(b, b.detach().clone(), b._version) for b in homes.values() if not b.is_inference()]
        self._homes = [(m, dict(m._buffers)) for m in modules if m._buffers]
        # a live autograd graph may have saved these buffers: their version counters must not move
        self._versions = torch.autograd._unsafe_preserve_version_counter(tuple(b for b, _, _ in self._buffers))
        self._versions.__enter__()
        for leaf in self._leaves:
            leaf.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        put_rng(self._rng)
        for leaf, grad in self._grads:
            leaf.grad = grad
        with torch.no_grad():
            for buffer, copy, version in self._buffers:
                if buffer._version != version:
                    buffer.copy_(copy)
        self._versions.__exit__()
        for module, buffers in self._homes:
            module._buffers.update(buffers)
        for module, attributes in self._attributes:
            _put_back(module, attributes)
        for item in self._lists:
            item.restore()


class _Mutable:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.copy = value.copy()

    def restore(self) -> None:
        self.value.clear()
        if isinstance(self.value, dict | set):
            self.value.update(self.copy)
        else:
            self.value.extend(self.copy)


def is_mutable(value: object) -> bool:
    """Whether a value is a plain container that a forward pass could append to."""
    return type(value) in (list, dict, set, deque)


Rng = tuple[torch.Tensor, list[torch.Tensor]]


def take_rng() -> Rng:
    """Take the state of torch's random generators, of the current device only (no device wait)."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def put_rng(state: Rng) -> None:
    """Put it back."""
    torch.set_rng_state(state[0])
    for value in state[1]:
        torch.cuda.set_rng_state(value)
