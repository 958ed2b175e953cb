"""Follow a value that outlives its step through the calls of a step: whether it goes into its own next value."""

from __future__ import annotations

from typing import Any

import torch

from whynan.capsule.tape.arguments import leaves
from whynan.capsule.tape.entries import Entry, Outside, target_of
from whynan.capsule.tape.facts import is_readable, is_released, memory_of
from whynan.capsule.tape.tape import Tape
from whynan.engine.markers import ASKS

SMALL = 1 << 20  # elements of a carried value that is looked at

# NaN goes in and does not come out
_AWARE = ASKS | frozenset(
    {"fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
     "__le__", "__gt__", "__ge__", "count_nonzero", "nonzero", "argmax", "argmin", "argsort", "isclose", "zeros_like", "ones_like", "full_like",
     "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
)  # fmt: skip
# what comes out is some of what went in, unchanged: seen through the same memory,
_VIEWS = frozenset(
    {"__getitem__", "__get__", "select", "narrow", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "t", "transpose", "permute",
     "movedim", "detach", "expand", "expand_as", "chunk", "split", "unbind", "__iter__", "view_as", "contiguous", "diagonal", "swapaxes"}
)  # fmt: skip
# or copied
_COPIES = frozenset(
    {"clone", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "cat", "concat", "stack", "where", "masked_fill", "masked_select",
     "index_select", "index_copy", "gather", "take", "scatter", "roll", "flip", "repeat", "tile", "sort", "topk", "masked_scatter", "index_fill",
     "select_scatter", "slice_scatter", "type_as", "tensor", "as_tensor"}
)  # fmt: skip
# the old value of what is written does not count
_OVERWRITES = frozenset({"fill", "zero", "copy", "set", "__set__", "normal", "uniform", "random", "bernoulli", "exponential"})
_OVERWRITES_PART = frozenset({"__setitem__", "masked_fill", "index_copy", "index_fill", "scatter", "index_put", "masked_scatter", "put"})


class Flow:
    """Follows a value through the calls of a step: an average goes into its own next value, and its NaN with it.

    A table in which NaN marks what is not known yet does not: it is read by functions that know of NaN, and written anew.
    """

    def __init__(self, tape: Tape, tensor: torch.Tensor) -> None:
        self._tensor, self._memory = tensor, memory_of(tensor)
        self._rebound = tape.made_before(tensor)
        self._holds = True  # the memory still has something of the old value
        self._views: set[int] = set()  # entries that return a view of it
        self._made: dict[int, bool] = {}  # entries that return something of it, and whether they computed with it
        self.met = False  # some call of the step reads or writes it

    def returns(self, entries: list[Entry]) -> bool:
        """Whether the step computes the next value from this one."""
        return any(self._follow(entry) for entry in entries)

    def trains(self, entries: list[Entry]) -> bool:
        """Whether it meets something that has a gradient, or the way back itself: a metric that is only printed does not."""
        touched: set[int] = set()
        memories = {self._memory}
        for entry in entries:
            if any(memory_of(leaf.tensor) in memories if isinstance(leaf, Outside) else leaf.entry in touched for leaf in entry.reads):
                if entry.needs_grad or entry.kind in ("backward", "derivative"):  # what becomes of it may be decided outside torch
                    return True
                touched.add(entry.number)
                target = leaves(target_of(entry)) if entry.kind == "write" else ()
                memories |= {memory_of(leaf.tensor) for leaf in target if isinstance(leaf, Outside)}
        return False

    def _follow(self, entry: Entry) -> bool:
        name = getattr(entry.fn, "__name__", "").removeprefix("_foreach_")
        stem = name if name.endswith("__") else name.rstrip("_")
        writes = entry.kind == "write"
        target = list(leaves(target_of(entry))) if writes else []
        own = any(self._is_it(leaf) for leaf in target)
        self.met = self.met or own or any(self._is_it(leaf) for leaf in entry.reads)
        overwrites = stem in _OVERWRITES or (writes and stem in _OVERWRITES_PART)
        reads = [leaf for leaf in entry.reads if not (writes and overwrites and any(leaf is t for t in target))]
        sources = [self._computed(leaf) for leaf in reads if self._has_it(leaf)]
        if not sources or stem in _AWARE:
            if own and overwrites and _whole(entry, stem) and any(isinstance(leaf, Outside) for leaf in target):
                self._holds = False
            return False
        computed = any(sources) or not (stem in _VIEWS or stem in _COPIES or overwrites)
        self._made[entry.number] = computed
        if stem in _VIEWS and any(self._is_it(leaf) for leaf in entry.reads):
            self._views.add(entry.number)
        if own:
            self._holds = True
        return computed and (own or (self._rebound and any(map(self._succeeds, (ref() for ref in entry.refs)))))

    def _is_it(self, leaf: Any) -> bool:
        if isinstance(leaf, Outside):
            return leaf.tensor is self._tensor or memory_of(leaf.tensor) == self._memory
        return getattr(leaf, "entry", None) in self._views

    def _has_it(self, leaf: Any) -> bool:
        return self._holds if self._is_it(leaf) else getattr(leaf, "entry", None) in self._made

    def _computed(self, leaf: Any) -> bool:
        return self._made.get(getattr(leaf, "entry", -1), False)

    def _succeeds(self, made: torch.Tensor | None) -> bool:
        """Whether a result that is still held can be the value of the next step."""
        return made is not None and is_plain(made) and made.shape == self._tensor.shape


def _whole(entry: Entry, stem: str) -> bool:
    index = entry.args[1] if len(entry.args) > 1 else None
    return stem in _OVERWRITES or (stem == "__setitem__" and (index is Ellipsis or index == slice(None)))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a running value: small, dense, of floating point, and no weight."""
    dense = type(tensor) is torch.Tensor and is_readable(tensor)
    return dense and tensor.is_floating_point() and not tensor.requires_grad and 0 < tensor.numel() <= SMALL and not is_released(tensor)
