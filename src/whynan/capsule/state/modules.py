"""Module state that a forward pass changes: buffers and plain attributes, kept from the beginning of a step.

A bad forward pass poisons BatchNorm's running statistics whether the step is skipped or not, so the values from before
it must be at hand. Cost: a version check per buffer, one fused copy of the buffers that really change, and a shallow
copy of the attribute dictionary of each submodule that changes any.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from whynan.capsule.state.buffers import Buffers, Copies
from whynan.capsule.state.holdings import BASE_KEYS, Mutable, frozen_state, holdings, own_modules, put_back
from whynan.capsule.state.prints import MAY_HOLD, Print, can_be_gone_through, differs, mark, print_of
from whynan.capsule.state.randomness import ForeignDraws, Rng
from whynan.capsule.state.surroundings import Surroundings
from whynan.capsule.tape.facts import is_memory
from whynan.tripwire.values import damage_of

_OF_THE_LOOP = ("training", "forward")  # Lightning puts another forward in place for a call
_NOTHING: Any = object()
Kept = list[tuple[torch.nn.Module, dict[str, Any]]]
Homes = list[tuple[torch.nn.Module, str, torch.Tensor | None]]
_RENEWALS = 8  # times that what a module does is learned anew because it has other layers
_LEARNED = 4  # calls after which it is known what a module writes to


class ModuleState:
    """The state of one root module at the beginning of the current step."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)
        self.buffers = Buffers()
        self._homes: Homes = []
        self._empty: list[tuple[dict[str, Any], str]] = []  # names of buffers that are None
        self._attributes: Kept = []
        self._holders: list[torch.nn.Module] = []
        self._held: list[Mutable] = []
        self._parameters: Kept = []
        self._rebinding: list[torch.nn.Module] = []  # those whose parameters are exchanged for others
        self._exchanging: list[torch.nn.Module] = []  # those whose buffers are
        self._replaced: Homes = []  # buffers that others had been put in the place of when this step began
        self._modules = own_modules(root)
        self.busy = self._modules  # those whose attributes change
        self.tables: list[tuple[dict[str, Any], bool]] = []  # where a loop may set something: attributes, and parameters, of which a plain tensor is foreign
        self._set: set[int] = set()  # those in which it does between two calls of a step
        self._left: dict[int, dict[str, Any]] = {}  # all as the last call in this step has left them
        self.calls = 0
        self.still = False  # until the next look nothing of it has to be copied: it has no buffers, and its attributes do not change
        self.open = False  # what it does is recorded, and not its call
        self.begun = False  # called in the step in progress, and not put back
        self.aside = False  # what it did in it came to nothing, and is no part of a dropped step
        self._rewound = False  # whether attributes change cannot be learned from a step that was taken back
        self.draws = ForeignDraws(root)
        self.around = Surroundings(root)
        self.altered = False  # it has got modules or buffers that it had not when this was made
        self.renewals = 0  # how often that was so
        self._frozen: list[tuple[torch.Tensor, Print]] = []  # those it has, as they were before one of its first calls
        self._first: tuple[Copies, Homes, Kept, Kept] | None = None  # of the first micro-batch
        self._further: list[int] = []  # buffers kept at a further call of this step
        self._rested: dict[int, dict[str, Any]] = {}  # tables as the last step has left them
        self._own: set[tuple[int, str]] = set()  # what the very first call has changed in its tables itself
        self._resnapshot()

    def begin(self, again: bool = False) -> None:
        """Take the state before the first call of a step, or of a further micro-batch in it."""
        self.buffers.set_aside(self.aside)
        self.aside = False
        self.calls += 1
        self.begun = True
        self._left = {}
        if self.calls < _LEARNED and not self._sharded:
            self._frozen = [(p, print_of(p)) for p in self._root_of().parameters() if not p.requires_grad and not is_lazy(p)]
        if self.still and not self.around.busy and not again and self.calls % 64 > 4:
            return
        if self.calls % 64 == 1 and self.calls > 1:
            self._renew()
        self.buffers.drop(self._further)
        self._further.clear()
        if not again:
            self._first = None
        elif self._first is None:
            self._first = self.buffers.cloned(), self._homes, self._attributes, self._parameters
        self._copy_attributes()
        self._copy_parameters()
        if self.calls % 64 < 5:  # in others it stays the same
            self.tables = [(vars(m), False) for m in self.busy]
            if not self._sharded:  # there it is not the loop that exchanges parameters
                self.tables += [(m._parameters, True) for m, _ in self._parameters]
            self.tables += [(m._buffers, False) for m in self._exchanging]
        self.around.begin(everything=self.calls < 5 or self.calls % 64 == 1, again=again)
        self.still = not (self.buffers.copies or self.busy or self._holders or self._rebinding or self.around.busy or again)
        if not self.buffers.copies:
            return
        if self.calls < _LEARNED:
            self.buffers.learn_silent()
        self.buffers.take_anew()
        self._replaced = [(m, name, buffer) for m, name, buffer in self._homes if m._buffers.get(name) is not buffer]
        if others := {id(m): m for m, *_ in self._replaced}:
            known = {id(table) for table, _ in self.tables}
            self.tables += [(m._buffers, False) for m in others.values() if id(m._buffers) not in known]
            self._exchanging = list({id(m): m for m in (*self._exchanging, *others.values())}.values())
            self._resnapshot()

    @property
    def is_old(self) -> bool:
        """Whether there is more in the module by now than this knows of: layers added or exchanged, lazy ones given a shape, buffers where there was None."""
        if self.altered or (self._lazy and not all(map(is_lazy, self._lazy))):
            return True
        return any(table.get(name) is not None for table, name in self._empty)

    def alter(self, module: torch.nn.Module) -> None:
        """A module gets another one in it, or a buffer."""
        self.altered = self.altered or id(module) in self._ids

    def renewed(self) -> ModuleState:
        """Return what is to stand in its place before the next step: everything is learned anew, unless that happens time and again."""
        if self.renewals >= _RENEWALS:
            self._renew()
            return self
        new = ModuleState(self._root_of())
        new.open, new.renewals = self.open, self.renewals + 1
        return new

    def _renew(self) -> None:
        """Take in layers and buffers that were added or exchanged."""
        if self.is_old or any(a is not b for a, b in zip_longest(own_modules(self._root_of()), self._modules)):
            self.altered, self.still = False, False
            self._resnapshot()
            self.busy = self._modules

    def given(self) -> Iterator[tuple[dict[str, Any], str, Any, bool]]:
        """Yield what a loop may have set before a call, with its table: what holds tensors, and all that is other since the last call of this step."""
        for table, exchanged in self.tables:
            left = self._left.get(id(table))
            for name, value in list(table.items()):
                if name in BASE_KEYS:
                    continue
                if left is None:
                    if type(value) in MAY_HOLD and can_be_gone_through(value):
                        yield table, name, value, exchanged
                elif left.get(name) != mark(value) and can_be_gone_through(value):
                    self._set.add(id(table))
                    yield table, name, value, True

    def is_of_buffers(self, table: dict[str, Any]) -> bool:
        """Whether a table is one of buffers: what is written into these is copied when a step begins."""
        return any(m._buffers is table for m in self._exchanging)

    def further(self) -> None:
        """A further call in a step: keep buffers that the loop has put in place since the first one."""
        for module in self._modules if self.calls < _LEARNED else self._exchanging:
            others = [b for b in module._buffers.values() if b is not None and id(b) not in self.buffers.copies and not is_lazy(b) and is_memory(b)]
            self.buffers.add(others)
            self._further += map(id, others)
            if others and all(m is not module for m in self._exchanging):
                self._exchanging.append(module)
        if self._further:
            self._find_silent()

    def called(self) -> None:
        """A call is over: what is set from here on is set by the loop."""
        if self.calls == 1 and not self._left:
            self._own = {(id(table), name) for table, name, _, _ in self._changed()}
        self._left = {id(table): {k: mark(v) for k, v in table.items() if k not in BASE_KEYS} for table, _ in self.tables}

    def ended(self, before: Rng) -> None:
        """A call is over before which everything was taken: note what it draws from and changes outside torch."""
        self.draws.compare(before)
        self.around.learn()
        if moving := [p for p, was in self._frozen if id(p) not in self.buffers.copies and print_of(p) != was]:
            self.buffers.add_moving(moving)
            self.still = False
        self._frozen = []

    def _copy_parameters(self) -> None:
        """Keep which parameters stand where, in modules where new ones are put in place (a codebook that is averaged, fast weights); as for attributes."""
        turn = self.calls % 64
        if turn == 3:
            self._rebinding = [m for m, kept in self._parameters if id(m._parameters) in self._set or differs(m._parameters, kept)]
        modules = [] if self._sharded else self._modules if turn in (1, 2) else self._rebinding  # what is spread over ranks is exchanged by its wrapper
        self._parameters = [(m, dict(m._parameters)) for m in modules if isinstance(m._parameters, dict)]  # a scripted module has none of its own

    def _root_of(self) -> torch.nn.Module:
        root = self._root()
        assert root is not None
        return root

    def _resnapshot(self) -> None:
        root = self._root_of()
        self._modules = own_modules(root)
        self._sharded = any(cls.__module__.startswith("torch.distributed") for m in self._modules for cls in type(m).__mro__)
        self._ids = frozenset(map(id, self._modules))
        self._lazy = [b for m in self._modules for b in m._buffers.values() if b is not None and is_lazy(b)]
        held = [(m, n, b) for m in self._modules for n, b in m._buffers.items() if b is None or not is_lazy(b)]
        self._homes = [(m, n, b) for m, n, b in held if isinstance(m._buffers, dict)]  # in a scripted module nothing can be put in the place of another
        self._empty = [(m._buffers, n) for m, n, b in self._homes if b is None and not isinstance(m, _NormBase)]  # which never fills its own
        self.buffers.take([b for _, _, b in held if b is not None and is_memory(b)] + frozen_state(root))
        self._find_silent()

    def _find_silent(self) -> None:
        norms = [m for m in self._modules if isinstance(m, _NormBase)]
        self.buffers.silent.update(id(b) for m in norms for b in (m.running_mean, m.running_var) if b is not None)

    def _copy_attributes(self) -> None:
        # after a few steps only the submodules that were seen to change an attribute are copied
        if self.calls % 64 == 4 and not self._rewound:
            before = self._attributes
            changing = [m for m, old in before if id(vars(m)) in self._set or differs(m.__dict__, old)]
            self.busy = changing if len(before) == len(self._modules) else self.busy
        elif self.calls % 64 == 2:
            self.busy, self._rewound = self._modules, False
        self._attributes = [(m, m.__dict__.copy()) for m in self.busy] if self.busy else []
        if self.calls % 64 == 1:
            self._holders = [m for m in self._modules if holdings(m.__dict__)]
        self._held = [Mutable(v) for m in self._holders for v in holdings(m.__dict__)] if self._holders else []

    def changed_buffers(self) -> list[torch.Tensor]:
        """Return the floating-point buffers written since the step began."""
        if not self.buffers.copies and not self._homes:
            return []
        if self.calls < _LEARNED:
            self.buffers.learn_silent()
        changed = self.buffers.written()
        for module, name, buffer in self._homes:
            other = module._buffers.get(name)  # put in the place of the old one
            if other is not buffer and other is not None and other.is_floating_point():
                changed[id(other)] = other
        self.buffers.changing = self.buffers.changing or bool(changed)
        return list(changed.values())

    def named(self, buffers: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return those of some buffers that the model has, with their names."""
        root, wanted = self._root(), {id(b) for b in buffers}
        return [(name, b) for name, b in root.named_buffers() if id(b) in wanted] if root is not None else []

    def carried(self) -> list[tuple[str, torch.Tensor]]:
        """Return the plain tensors that forward passes put in place of older ones, with the names of their attributes."""
        return [(name, value) for m in self.busy for name, value in vars(m).items() if isinstance(value, torch.Tensor)]

    def rest(self) -> None:
        """A step is over: what stands in the tables now was not put there for the time of a call."""
        if self.calls % 64 < 2:  # the next call looks at all of them
            tables = [table for m in self._modules for table in (vars(m), m._parameters, m._buffers) if isinstance(table, dict)]
        else:
            tables = [vars(m) for m, _ in self._attributes] + [m._parameters for m, _ in self._parameters] + [m._buffers for m in self._exchanging]
        self._rested = {id(table): table.copy() for table in tables}

    def _changed(self) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
        """Yield what is other in attributes, parameters and buffers than when the step began: table, name, what was there (or `_NOTHING`) and what is now."""
        kept: list[tuple[dict[str, Any], str, Any]] = [(m._buffers, name, buffer) for m, name, buffer in self._homes]
        kept += [(m._parameters, name, parameter) for m, parameters in self._parameters for name, parameter in parameters.items()]
        for module, attributes in self._attributes:
            current = vars(module)
            kept += [(current, name, attributes.get(name, _NOTHING)) for name in {**current, **attributes} if name not in _OF_THE_LOOP]
        for table, name, was in kept:
            if (now := table.get(name, _NOTHING)) is not was:
                yield table, name, was, now

    def _is_back(self, table: dict[str, Any], name: str, now: Any) -> bool:
        """Whether the loop itself has ended an exchange that it made for a call: weights for `functional_call`, adapters that were off."""
        rested = self._rested.get(id(table))
        if rested is not None:
            return rested.get(name, _NOTHING) is now
        if (id(table), name) in self._own:
            return False
        of_attributes = "_parameters" in table
        return not isinstance(now, torch.Tensor) or not (of_attributes or damage_of(now.detach()))

    def rewind(self, alone: bool = False) -> None:
        """Put buffers and attributes back to the beginning of the step (or only of the micro-batch), bit for bit."""
        if not self.begun:
            return  # not called in this step: nothing of it is this step's
        if self.aside and not self.buffers.are_damaged():
            return  # called before the batch, for nothing
        self.begun, self._rewound = False, True
        if self.calls < _LEARNED:
            self.buffers.learn_silent()
        self.buffers.take_older()
        if self._first is not None and not alone:
            self.buffers.copies, self._homes, self._attributes, self._parameters = self._first
        self.buffers.put_back()
        for table, name, was, now in list(self._changed()):
            if not self._is_back(table, name, now):
                _set(table, name, was)
        for module, name, buffer in self._replaced:
            now = module._buffers.get(name)
            if now is not None and buffer is not None and damage_of(now.detach()) and not damage_of(buffer.detach()):
                module._buffers[name] = buffer  # made bad before the first call of the step
        for item in self._held:
            item.restore()
        with torch.autograd._unsafe_preserve_version_counter(self.around.tensors()):  # type: ignore[attr-defined]
            self.around.mend(alone)

    def leave(self) -> list[tuple[torch.nn.Module, str]]:
        """The program leaves a bad step: the next begins with the buffers that this one has damaged. Return whose they are, and their names."""
        homes = [(m, n, b, m._buffers.get(n)) for m, n, b in self._homes]
        changed = {id(b) for b in self.changed_buffers()}
        bad = {id(now): now for *_, now in homes if now is not None and id(now) in changed and damage_of(now.detach())}
        self.buffers.add(b for b in bad.values() if is_memory(b))
        self._homes = [(m, n, now if now is not None and id(now) in bad else b) for m, n, b, now in homes]
        return [(m, n) for m, n, b in self._homes if id(b) in bad]

    def kept(self) -> list[Any]:
        """Return the tensors and containers that `replay_from` writes to."""
        return [*(buffer for buffer, _, _ in self.buffers.copies.values()), *(item.value for item in self._held)]

    def replay_from(self) -> None:
        """Load the state of the beginning of the step for a replay; the caller puts the present back (`Stasis`)."""
        self.buffers.take_older()
        if self.calls < _LEARNED:
            self.buffers.learn_silent()
        self.buffers.load()
        for module, name, buffer in self._homes:
            module._buffers[name] = buffer
        for module, parameters in self._parameters:
            module._parameters.update(parameters)
        for module, attributes in self._attributes:
            put_back(module, attributes)
        for item in self._held:
            item.restore()
        self.around.put_back()


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _NOTHING:
        table.pop(name, None)
    else:
        table[name] = value
