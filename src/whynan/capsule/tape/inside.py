"""Tensors that are born inside a call and picked up elsewhere: a stashed auxiliary loss, a captured feature map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from whynan.capsule.tape.entries import Entry, Inner, Slot, dependencies
from whynan.capsule.tape.facts import node_of

if TYPE_CHECKING:
    from whynan.capsule.tape.tape import Tape


class Inside:
    """Finds the call of a tape that such a tensor was born in.

    Cost: nothing but for a tensor with a history that no call has returned.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._homes: list[tuple[torch.nn.Module, str]] = []  # attributes that tensors were picked up from
        self.seen_apart: Callable[[torch.nn.Module], None] = lambda module: None

    def find(self, tensor: torch.Tensor) -> Inner | None:
        """Return the call that a tensor was computed in, and which of its nodes made it; None where a replay would not find it again."""
        number = tensor.grad_fn._sequence_nr()  # type: ignore[union-attr]
        for entry in self._tape.entries.values():
            if entry.first_node <= number < entry.last_node:
                home = self._home_of(tensor, entry.fn) if isinstance(entry.fn, torch.nn.Module) else None
                if home is None and self.stands_apart(entry, [tensor]):
                    return None
                inner = Inner(entry.number, number - entry.first_node, tensor.output_nr)
                entry.wanted = entry.wanted | {(inner.offset, inner.output_nr)}
                if home is not None:
                    entry.left = {**(entry.left or {}), inner: home}
                return inner
        return None

    def stands_apart(self, entry: Entry, made: Iterable[torch.Tensor]) -> bool:
        """Whether what a module call made goes back to calls of this step whose results it got by no argument: by a global, or a handler around it.

        A replay may not find them there any more. What others pick up from inside such a call is taken as it is.
        """
        if entry.apart is None:
            known = {entry.number, *dependencies(entry)}
            others = [e for e in self._tape.entries.values() if e.number > self._tape.rolled and e.number not in known]
            handed = {node_of(t) for read in entry.reads if isinstance(read, Slot) and (t := self._tape.alive(read)) is not None}
            if any(e.first_node <= n < e.last_node and not _share(e.fn, entry.fn) for n in _behind(entry, made, handed) for e in others):
                entry.apart = True
                self.seen_apart(entry.fn)  # type: ignore[arg-type]
        return entry.apart is True

    def _home_of(self, tensor: torch.Tensor, root: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
        """Return the module and the attribute that a forward pass left a tensor in: where it was the last time, or anywhere below a root."""
        for home in self._homes:
            if home[0].__dict__.get(home[1]) is tensor:
                return home
        found = next(((m, name) for m in root.modules() for name, value in m.__dict__.items() if value is tensor), None)
        if found is not None:
            self._homes = [found, *self._homes[:7]]
        return found

    def clear(self) -> None:
        """Forget where tensors were picked up from."""
        self._homes.clear()


def _behind(entry: Entry, made: Iterable[torch.Tensor], handed: set[Any]) -> Iterator[int]:
    """Yield the numbers of the autograd nodes from before a call that its results go back to, but for those `handed` to it."""
    seen = {None, *handed}  # holds them: the same node would come back as another object
    todo = [node_of(tensor) for tensor in made]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < entry.first_node:
            yield node._sequence_nr()
        else:
            todo += [before for before, _ in node.next_functions]


def _share(one: object, other: object) -> bool:
    """Whether two calls are of models with parts in common: what the one leaves in attributes the other finds, also in a replay."""
    return isinstance(one, torch.nn.Module) and isinstance(other, torch.nn.Module) and not set(one.modules()).isdisjoint(other.modules())
