"""Where the calls of a step begin: those of a model that came to nothing before (statistics estimated anew, a dry run, an extra pass) are not of its batch.

update_bn(loader, model)            no result of it is held when the next call comes: that one begins the step
teacher = model(x).detach()         held, and computed with
hard = model(x).argmax().item()     not held, but given the batch that the next call is given
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from whynan.capsule.tape.entries import Entry, Made, Outside, Slot, target_of
from whynan.capsule.tape.nested import tensors_of
from whynan.capsule.tape.tape import Tape

_GONE_BACK = frozenset({"backward", "derivative", "clip", "function", "optimizer"})


class Beginning:
    """Asks the tape of one recorder.

    Cost: nothing for the first call of a step; for a further one a look at the newest entries, until something is found that is of use.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._since = 0  # the entry after which the step began anew
        self.aside: dict[int, None] = {}  # roots that were called before the step began anew
        self._witness: Made | None = None  # a result of theirs that was held when it was last asked
        self._behind: set[int] = set()  # the calls of a model in this step, and the calls behind what they were given
        self._known = 0  # the newest entry when that was asked
        self.has_gradients: Callable[[], bool] = lambda: True

    @property
    def start(self) -> int:
        """The entry that the calls of the present step come after."""
        return max(self._since, self._tape.rolled)

    def roll(self) -> None:
        """A step is over."""
        self._witness = None
        self._behind.clear()

    def anew(self) -> None:
        """The step begins with the next call, and what was computed for it since the last one."""
        last = next((entry.number for entry in self._entries() if entry.runs_model or entry.kind == "zero" or entry.kind in _GONE_BACK), 0)
        self._since, self._witness = max(last, self.start), None
        self._behind.clear()

    def came_to_nothing(self, given: Any) -> bool:
        """Whether nothing that the calls of this step have made so far is of use to a call that is about to be made with something `given`."""
        if self._witness is not None and self._witness() is not None:
            return False
        entries = self._tape.entries
        newest = entries[next(reversed(entries))] if entries else None
        if newest is not None and newest.runs_model and newest.number > self.start and newest.refs and newest.refs[0]() is not None:
            return False  # as mostly: the loss is called with what the model has just returned
        roots = self._roots_of(given)
        return roots is not None and not self._are_of_use(roots)

    def _entries(self) -> Iterator[Entry]:
        since = self.start
        for entry in reversed(self._tape.entries.values()):
            if entry.number <= since:
                return
            yield entry

    def _are_of_use(self, roots: set[int]) -> bool:
        """Whether something is held that was made of them, or one was given a tensor that the next call goes back to, by its id."""
        zeroed, spent, known = False, False, dict[int, bool]()
        for entry in self._entries():  # until something is found: a program may make thousands of calls in a step
            zeroed = zeroed or entry.kind == "zero"
            if entry.kind in _GONE_BACK:
                if not zeroed or self.has_gradients():
                    return True
                spent = True
            for made in entry.refs:
                if made() is not None and not (spent and entry.needs_grad) and self._is_computed(entry, zeroed, known):
                    self._witness = made
                    return True
            if entry.runs_model and any(isinstance(leaf, Outside) and id(leaf.tensor) in roots for leaf in entry.reads):
                return True
        return False

    def _is_computed(self, entry: Entry, zeroed: bool, known: dict[int, bool]) -> bool:
        """Whether a result goes back to a call of a model, or to gradients; what is written from gradients that were then dropped is state (curvatures)."""
        if zeroed and self._is_written_outside(entry):
            return self._goes_back(entry, False, {})
        return self._goes_back(entry, True, known)

    def _is_written_outside(self, entry: Entry) -> bool:
        """Whether a result is a tensor that was there before, written to perhaps several times."""
        last: Entry | None = entry
        while last is not None and last.kind == "write":
            target = target_of(last)
            if isinstance(target, Outside):
                return True
            last = self._tape.entries.get(target.entry) if isinstance(target, Slot) else None
        return False

    def _goes_back(self, entry: Entry, gradients: bool, known: dict[int, bool]) -> bool:
        since, todo = self.start, [entry]
        while todo:
            one = todo.pop()
            if known.get(one.number) or one.runs_model or (gradients and one.kind == "grad"):
                known.update((number, True) for number in (entry.number, one.number))
                return True
            if one.number not in known:
                known[one.number] = False
                before = (self._tape.entries.get(read.entry) for read in one.reads if not isinstance(read, Outside) and read.entry > since)
                todo += [e for e in before if e is not None]
        return False

    def _roots_of(self, given: Any) -> set[int] | None:
        """Return the tensors from outside, by their ids, that something was computed from; None for a result of these calls, or what one was given."""
        behind, roots, seen = self._behind_calls(), set[int](), set[int]()
        todo: list[Any] = [self._tape.slot_of(tensor) or tensor for tensor in tensors_of(given)]
        while todo:
            one = todo.pop()
            if not isinstance(one, Slot):
                roots.add(id(one))
            elif one.entry in behind:
                return None
            elif one.entry not in seen and (entry := self._tape.entries.get(one.entry)) is not None:
                seen.add(one.entry)
                todo += [leaf.tensor if isinstance(leaf, Outside) else Slot(leaf.entry, 0) for leaf in entry.reads]
        return roots

    def _behind_calls(self) -> set[int]:
        """Return the calls of a model in this step, and the calls behind what they were given."""
        fresh = list(takewhile(lambda entry: entry.number != self._known, self._entries()))
        for entry in fresh:
            if entry.runs_model:
                self._behind.update((entry.number, *(leaf.entry for leaf in entry.reads if not isinstance(leaf, Outside))))
        self._known = fresh[0].number if fresh else self._known
        return self._behind
