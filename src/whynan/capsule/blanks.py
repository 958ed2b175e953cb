"""Memory that nothing was written to: what `torch.empty` gives may hold anything, and a NaN in it is not damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from whynan.capsule.sites import Site
from whynan.capsule.tape.nested import tensors_of


class Blanks:
    """The storages that came from `torch.empty` while we watched, until they are written as a whole."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}  # by number: a weak reference that keeps the number from reuse
        self._partly: set[int] = set()
        self._made_at: dict[int, Site | None] = {}

    def add(self, storage: torch.UntypedStorage, site: Site | None = None, partly: bool = False) -> None:
        """Take note of a storage and of the line that asked for it; parts of it may have been written."""
        self.held[storage._cdata] = StorageWeakRef(storage)
        self._made_at[storage._cdata] = site
        if partly:
            self._partly.add(storage._cdata)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in such memory, at most partly written."""
        key = tensor.untyped_storage()._cdata
        return key in self.held and (tensor._version == 0 or key in self._partly)

    def made_at(self, tensor: torch.Tensor) -> Site | None:
        """Return the line that asked for the memory of a tensor."""
        return self._made_at.get(tensor.untyped_storage()._cdata)

    def among(self, args: Any) -> bool:
        """Whether any of the arguments is such a tensor that was never written to."""
        return any(t._version == 0 and self.has(t) for t in tensors_of(args) if type(t) is torch.Tensor)

    def written(self, func: Callable[..., Any], target: torch.Tensor) -> None:
        """A function wrote to a tensor."""
        if is_lazy(target):
            return
        storage = target.untyped_storage()
        if storage._cdata in self.held:
            whole = target.numel() * target.element_size() >= storage.nbytes() and getattr(func, "__name__", "") != "__setitem__"
            if whole:
                self.forget(storage)
            else:
                self._partly.add(storage._cdata)

    def forget(self, storage: torch.UntypedStorage) -> None:
        """What a storage holds was made somewhere."""
        self.held.pop(storage._cdata, None)
        self._made_at.pop(storage._cdata, None)
        self._partly.discard(storage._cdata)
