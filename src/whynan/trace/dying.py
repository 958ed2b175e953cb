"""Where a gradient ends: the operation that gets one and hands on nothing but zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.replay import Program, call_entry
from whynan.capsule.sites import Site, live_site
from whynan.capsule.tape.entries import Entry

_FLOOR = call_entry.__code__
_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class End:
    """One operation in which a gradient ends."""

    site: Site | None
    node: str  # as autograd names it: ClampBackward1
    outside: bool  # of every module


@dataclass(frozen=True, slots=True)
class Endings:
    """What a replay showed."""

    ends: list[End]
    reaches: bool  # the graph of the loss leads to some weight


class _Places(TorchFunctionMode):
    """Writes down which numbers of autograd nodes were made at which place."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, int, Site | None, bool]] = []
        self.entry: Entry | None = None

    def entering(self, entry: Entry) -> None:
        """A tape entry begins."""
        self.entry = entry

    def leaving(self, entry: Entry) -> None:
        """A tape entry ended."""
        self.entry = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _node_number()
        result = func(*args, **(kwargs or {}))
        last = _node_number()
        if last > first:
            entry = self.entry
            self.made.append((first, last, live_site(_FLOOR, 2) or (entry.site if entry else None), entry is not None and not entry.runs_model))
        return result

    def place(self, number: int) -> tuple[Site | None, bool]:
        return next(((site, outside) for first, last, site, outside in self.made if first <= number < last), (None, False))


def endings(program: Program) -> Endings:
    """Play the forward pass again, go back from its losses, and see where the gradient ends."""
    places, ends = _Places(), list[End]()
    wanted = {id(leaf) for leaf in program.leaves}
    with program.still():
        with places:
            run = program.until_loss().play(places)
        losses = [loss for loss in run.losses if loss.grad_fn is not None]
        nodes = list(_nodes(losses))
        reaches = any(id(getattr(node, "variable", None)) in wanted for node in nodes)
        handles = [node.register_hook(_noting(node, places, ends)) for node in nodes if not hasattr(node, "variable")]
        try:
            torch.autograd.backward([loss.sum() for loss in losses])
        finally:
            for handle in handles:
                handle.remove()
    return Endings(ends, reaches)


def _nodes(losses: list[torch.Tensor]) -> Iterator[Any]:
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn for loss in losses]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [after for after, _ in node.next_functions]


def _noting(node: Any, places: _Places, ends: list[End]) -> Callable[[Any, Any], None]:
    def note(made: Any, given: Any) -> None:
        came = [g for g in given if g is not None]
        alive = any(bool(g.count_nonzero()) for g in came)
        handed = [g for g in made if g is not None]
        if alive and handed and not any(bool(g.count_nonzero()) for g in handed):
            site, outside = places.place(node._sequence_nr())
            ends.append(End(site, type(node).__name__, outside))

    return note
