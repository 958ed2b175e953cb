"""The outermost modules that a program calls, and the state of each at the beginning of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from whynan.capsule.beginning import Beginning
from whynan.capsule.state.modules import ModuleState
from whynan.capsule.state.surroundings import Spot
from whynan.capsule.tape.arguments import Arguments, Reads
from whynan.capsule.tape.entries import Entry, Outside, Slot
from whynan.capsule.tape.tape import Tape
from whynan.capsule.unseen import unseen

FORGET = 64  # steps after which a module that is not called any more is let go
_CLOSED = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.jit")  # classes whose calls do more than compute

Begun = tuple[ModuleState, bool]
_is_grad_enabled = torch.is_grad_enabled


@unseen
class Roots:
    """Takes the state of each root before its first call in a step.

    Cost: what `ModuleState` costs, once a step and root.
    """

    def __init__(self, tape: Tape, arguments: Arguments) -> None:
        self.states: dict[int, tuple[torch.nn.Module, ModuleState]] = {}
        self.beginning = Beginning(tape)
        self.seen: Callable[[torch.nn.Module], None] = lambda root: None
        self.has_buffers = False  # some root has had any
        self.between = False  # a program without optimizers has gone back: what it calls next begins a step
        self._tape, self._arguments = tape, arguments
        self._begun: dict[int, None] = {}  # roots whose state was taken, in this order
        self._again: dict[int, None] = {}  # and those that had an earlier micro-batch in this step
        self._called: dict[int, int] = {}  # by root: the step of its last call; in the order of the first calls in it
        self._rolls = 0
        self._others_over = 0  # the step in which a training began and all others were over, until it is made
        tape.inside.seen_apart = self._open

    def _begins_anew(self, root: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the calls of this step so far came to nothing, and a call that is about to be made is its first."""
        if self._again or not self._tape.forgets or not (root.training or _is_grad_enabled()):
            return False
        return self.beginning.came_to_nothing((args, kwargs))

    def set_aside(self) -> None:
        """What the models have done since the last step stays: a dropped step is put back to where it is now."""
        self.beginning.aside |= self._begun
        self._begun.clear()
        self.beginning.anew()
        for key in self.beginning.aside:
            if known := self.states.get(key):
                known[1].aside = True

    def begin(self, roots: Sequence[torch.nn.Module], args: Any, kwargs: dict[str, Any]) -> list[Begun]:
        """Take the state of the modules that a call runs before their first call in a step.

        Return each, and whether this call is to be watched for what it does outside torch.
        """
        if self._begun and any(self._begins_anew(root, args, kwargs) for root in roots):
            self.set_aside()
        if self.between:
            self.between = False
            self._end_states()
        return [self._take(root) for root in roots]

    def _take(self, root: torch.nn.Module) -> Begun:
        key = id(root)
        known = self.states.get(key)
        if known is None or known[0] is not root:
            self.seen(root)
            self.states[key] = known = (root, ModuleState(root))
            self._arguments.generators.find_around(root)
            self._begun.pop(key, None)
            self.has_buffers = self.has_buffers or any(m._buffers for m in root.modules())
        elif key not in self._begun and key not in self._again and known[1].is_old:
            self.states[key] = known = (root, known[1].renewed())
            self.has_buffers = self.has_buffers or any(m._buffers for m in root.modules())
        state = known[1]
        if key not in self._begun and (root.training or _is_grad_enabled() or not state.calls):  # a validation between two steps belongs to neither
            self._begun[key] = None
            again = key in self._again
            self.beginning.aside.pop(key, None)
            state.begin(again)
            if not again:
                self._called.pop(key, None)
                self._called[key] = self._rolls
        elif state.tables:
            state.further()
        draws = state.draws
        draws.calls += 1
        return state, draws.drew or draws.calls % 64 < 4

    def give(self, entry: Entry, state: ModuleState) -> None:
        """Note what the loop has put into a module (the weights of a hypernetwork, fast weights): a replay puts it there before the call."""
        for table, name, value, since in state.given():
            reads: Reads = []
            kept = self._arguments.keep(value, reads)
            if isinstance(kept, Slot) and state.is_of_buffers(table) and self._tape.is_write_from_outside(kept):
                continue
            if since or any(not isinstance(read, Outside) and read.entry > self._tape.rolled for read in reads):
                entry.given = (*entry.given, (table, name, kept))
                entry.reads = (*entry.reads, *reads)

    def ended(self, entry: Entry, state: ModuleState, looks: bool) -> None:
        """The call of a root is over: learn from it."""
        if looks:
            state.ended(entry.rng)
        if state.draws.calls < 4 and not entry.uses:
            entry.apart = None
            self._tape.inside.stands_apart(entry, [made for ref in entry.refs if (made := ref()) is not None])
        if state.tables:
            state.called()

    def _open(self, module: torch.nn.Module) -> None:
        """Have a module run with recording on from its next call on, where that can be."""
        known = self.states.get(id(module))
        if known is not None and not any(cls.__module__.startswith(_CLOSED) for cls in type(module).__mro__):
            known[1].open = module._compiled_call_impl is None

    def altered(self, module: torch.nn.Module) -> None:
        """A module gets another one in it, or a new buffer."""
        for _, state in self.states.values():
            state.alter(module)

    def roll(self, under_way: bool) -> None:
        """A step is over."""
        self.beginning.roll()
        self._end_states(rests=True, ends=not under_way)
        self._rolls += 1
        since = max(self._others_over, self._rolls - FORGET if self._rolls % FORGET == 0 else 0)
        self._others_over = 0
        if since:
            self._forget_unused(since)

    def begin_training(self) -> None:
        """A training begins when all others are over: after its first step what only they have called is let go."""
        self._others_over = self._rolls

    def _end_states(self, rests: bool = False, ends: bool = True) -> None:
        """What the models of a step began with is not needed any more; it `rests` at the end of a step, not when the next one calls."""
        for key in self._keys():
            if known := self.states.get(key):
                state = known[1]
                if rests and state.begun and not state.still:
                    state.rest()
                if ends:
                    state.begun = state.aside = False
        if ends:
            self._begun.clear()
            self._again.clear()
            self.beginning.aside.clear()

    def _keys(self) -> dict[int, None]:
        """Return the roots called in this step, those set aside first."""
        return self.beginning.aside | self._again | self._begun if self._again or self.beginning.aside else self._begun

    def _forget_unused(self, since: int) -> None:
        """Let go of modules that were not called since a step: a criterion made anew in every one, the model of an earlier trial."""
        for key in [k for k, last in self._called.items() if last < since]:
            del self._called[key]
            self.states.pop(key, None)

    def latest_first(self, micro_batch: bool = False) -> list[ModuleState]:
        """Return the state of the roots called in this step, or only in its last micro-batch, in the order to put it back in.

        A model and a part of it may both be called: the part's state is then from after the model's call, or the other way round.
        """
        keys = self._begun if micro_batch else self._keys()
        return [self.states[key][1] for key in reversed(keys) if key in self.states]

    def to_replay(self) -> list[tuple[torch.nn.Module, ModuleState]]:
        """Return all roots with their states in the order to load them in: those of earlier steps before those of the last one."""
        keys = [*reversed(self._called)]  # of one step the latest first
        return [self.states[key] for key in sorted(keys, key=self._called.__getitem__) if key in self.states]

    def current(self) -> list[ModuleState]:
        """Return the state of the roots that were called in this step."""
        return [self.states[key][1] for key in self._keys() if key in self.states]

    def current_modules(self) -> list[torch.nn.Module]:
        """Return the roots that were called in this step."""
        return [self.states[key][0] for key in self._keys() if key in self.states]

    def next_micro_batch(self) -> None:
        """Take module state anew within the same step, so that a micro-batch can be dropped alone."""
        self._again |= self._begun
        self._begun.clear()

    def around(self) -> list[Spot]:
        """Return what the code of these modules was seen to change outside them. Nothing else is touched: other threads change things, too."""
        return [spot for _, state in self.states.values() for spot in state.around.busy]

    def modules(self) -> list[torch.nn.Module]:
        """Return the outermost modules seen so far."""
        return [root for root, _ in self.states.values()]
