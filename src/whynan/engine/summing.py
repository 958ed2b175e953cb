"""The sums that a loss is made of, seen in a replay call by call, and operands left out of them.

The terms are found on the autograd graph: from the loss back through sums of scalars, stacked scalars and fixed factors. Calls are known
by their number in the replay, which makes the same calls each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.replay import Run, call_entry
from whynan.capsule.sites import Site, live_site
from whynan.capsule.tape.entries import Entry, Outside
from whynan.causes.fixes import plain_name
from whynan.trace.terms import Term
from whynan.tripwire.values import damage_of

MOST = 512  # values on the way from a loss back to its terms
Operand = tuple[int, int]  # number of the call, place among its operands
_FLOOR = call_entry.__code__
_SUMS, _JOINS, _PRODUCTS = ("add", "sub"), ("stack", "cat", "concat", "concatenate"), ("mul", "div")
_SUM_NODES = frozenset({"Add", "Sub", "Rsub", "Stack", "Cat"})
_LINEAR = frozenset({
    "Mul", "Div", "Neg", "Sum", "Mean", "Dot", "ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    site: Site | None
    bad: tuple[bool, ...] = ()  # for each operand of a sum, whether it is not finite


class Sums(TorchFunctionMode):
    """Sees the sums of scalars in a replay, and leaves some operands out of them.

    With `apart` each backward pass is judged alone: gradients that it made bad are set to 0 after it.
    """

    def __init__(self, leaves: list[torch.Tensor], cut: frozenset[Operand] = frozenset(), apart: bool = True) -> None:
        super().__init__()
        self.leaves, self.cut, self.apart = leaves, cut, apart
        self.count = 0  # calls that could be sums
        self.calls: dict[Any, _Call] = {}  # autograd node: the call that made it
        self.bad_passes: list[bool] = []  # for each backward pass, whether it made a bad gradient
        self.entry: Entry | None = None
        self._stand_ins: dict[int, torch.Tensor] = {}  # gradients that the program looked at and a replay has not
        self._bare: torch.Tensor | None = None  # a weight without a gradient that is looked at

    def entering(self, entry: Entry) -> None:
        """A tape entry begins."""
        self.entry = entry
        owner = entry.args[0] if entry.kind == "grad" and entry.args else None
        self._bare = owner.tensor if isinstance(owner, Outside) and owner.tensor.grad is None else None

    def leaving(self, entry: Entry) -> None:
        """A tape entry ended."""
        self.entry = None
        if self._bare is not None and self._bare.grad is not None:
            self._stand_ins[id(self._bare)] = self._bare.grad
        if entry.kind == "backward":
            self._stand_ins.clear()  # what it adds to is a gradient
        if entry.kind == "backward" and self.apart:
            bad = [leaf for leaf in self.leaves if leaf.grad is not None and damage_of(leaf.grad)]
            self.bad_passes.append(bool(bad))
            for leaf in bad:
                leaf.grad = torch.zeros_like(leaf)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = plain_name(func)
        joins = name in _JOINS and bool(args) and isinstance(args[0], list | tuple)
        if not joins and name not in (*_SUMS, *_PRODUCTS):
            return func(*args, **(kwargs or {}))
        number, self.count = self.count, self.count + 1
        given = args[0] if joins else args[:2]
        kept = [_nothing_of(value) if (number, place) in self.cut else value for place, value in enumerate(given)]
        if self.cut and any(new is not old for new, old in zip(kept, given, strict=True)):
            args = (type(given)(kept), *args[1:]) if joins else (*kept, *args[2:])
        scalar = all(not isinstance(value, torch.Tensor) or value.numel() == 1 for value in given)
        bad = tuple(map(_is_bad, given)) if scalar and name not in _PRODUCTS else ()  # before the call, which may write
        result = func(*args, **(kwargs or {}))
        if scalar and isinstance(result, torch.Tensor) and result.grad_fn is not None:
            self.calls[result.grad_fn] = _Call(number, live_site(_FLOOR, 2) or (self.entry.site if self.entry else None), bad)
        return result

    def gradients(self) -> list[torch.Tensor | None]:
        """Return copies of the gradients that the replay has made."""
        real = [None if leaf.grad is self._stand_ins.get(id(leaf)) else leaf.grad for leaf in self.leaves]
        return [None if grad is None else grad.detach().clone() for grad in real]

    def terms(self, run: Run) -> list[Term | None]:
        """Return the terms of each loss of a finished run as a tree; nothing for one that is no sum, or of too many."""
        return [_terms(t.grad_fn, self.calls) for t in run.losses]

    def operands(self) -> dict[int, tuple[Operand, Site | None, bool]]:
        """Return by the number that the trees know it by: an operand of a sum, where that is, and whether it is not finite."""
        return {_index(c.number, place): ((c.number, place), c.site, bad) for c in self.calls.values() for place, bad in enumerate(c.bad)}


def _nothing_of(value: Any) -> Any:
    return torch.zeros_like(value.detach()) if isinstance(value, torch.Tensor) else value


def _is_bad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(damage_of(value.detach()))


def _index(number: int, place: int) -> int:
    return number * (1 << 16) + place


def _terms(node: Any, calls: dict[Any, _Call]) -> Term | None:
    left = [MOST]
    tree = _tree(node, Term(-1), calls, left) if node is not None else None
    return tree if tree is not None and left[0] > 0 and any(len(term.parts) > 1 for term in tree.all()) else None


def _tree(node: Any, term: Term, calls: dict[Any, _Call], left: list[int]) -> Term:
    """Take what an autograd node stands for apart; `term` says where it goes in."""
    left[0] -= 1
    kind = node.name().partition("Backward")[0]
    inner = [(place, made) for place, (made, _) in enumerate(node.next_functions) if made is not None]
    call = calls.get(node)
    parts: list[tuple[Any, Term]] = []
    if left[0] > 0 and kind in _SUM_NODES and call is not None and call.bad:
        parts = [(made, Term(_index(call.number, place), call.site, place)) for place, made in inner]
    elif left[0] > 0 and kind in _LINEAR and len(inner) == 1 and (kind != "Div" or inner[0][0] == 0):
        place, made = inner[0]
        parts = [(made, Term(term.index, call.site, place, lone=place == 0) if call is not None else term)]  # a number stands behind its tensor
    return replace(term, parts=tuple(_tree(made, part, calls, left) for made, part in parts))
