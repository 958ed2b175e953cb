"""What the code of a model keeps outside its modules: globals and closures it sets, containers and objects of the program that it names.

A replay runs that code again: it must find a counter or a list as the step found it, and leave it as it is for the program. Only the
program's own code is looked at, not that of installed libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Protocol

import torch

from whynan.capsule.imports import is_library, is_users
from whynan.capsule.made import MISSING, attributes_of, codes_in, contents, home_of
from whynan.capsule.sites import is_installed, is_internal
from whynan.capsule.state.holdings import CONTAINERS, TABLES, fill, is_small
from whynan.capsule.tape.facts import is_readable
from whynan.tripwire.values import holds_bad

_OF_MODULES = frozenset(torch.nn.Module().__dict__)  # buffers, parameters, hooks: looked after elsewhere
_STORES = dis.opmap["STORE_GLOBAL"]
_STORES_CELL = dis.opmap["STORE_DEREF"]
_MOST = 10_000  # members of a container that is copied
_MANY = 2_000  # functions that are looked at
_REFUSALS = (RuntimeError, ValueError, TypeError)  # of an array made read-only, a tensor resized, a queue that another thread fills
_DATA = CONTAINERS | {int, float, complex, bool, str, bytes, tuple, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size}
_OURS = 2  # references to what only a spot holds, when it is asked for
_Cached = type(functools.cache(len))
_NUMBERS = 1 << 18  # of an array that is copied


class Spot(Protocol):
    """One thing that may change."""

    def take(self) -> Any: ...
    def put(self, saved: Any) -> None: ...
    def differs(self, saved: Any) -> bool: ...


@dataclass(slots=True, eq=False)
class Name:
    """A global variable."""

    table: dict[str, Any]
    name: str

    def take(self) -> Any:
        return self.table.get(self.name, MISSING)

    def put(self, saved: Any) -> None:
        if saved is MISSING:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = saved

    def differs(self, saved: Any) -> bool:
        return self.take() is not saved


@dataclass(slots=True, eq=False)
class Cell:
    """A variable of a function around another one."""

    cell: CellType

    def take(self) -> Any:
        return contents(self.cell)

    def put(self, saved: Any) -> None:
        if saved is not MISSING:
            self.cell.cell_contents = saved

    def differs(self, saved: Any) -> bool:
        return self.take() is not saved


@dataclass(slots=True, eq=False)
class Held:
    """Something whose inside may change."""

    held: Any
    of_module: bool = False  # it is state of the model, as a buffer is: a dropped step leaves nothing in it


class Inside(Held):
    """The members of a container, or the attributes of an object."""

    def take(self) -> Any:
        return self.held.copy()

    def put(self, saved: Any) -> None:
        if not self.differs(saved):
            return
        if isinstance(self.held, dict):  # never empty in between: another thread may be reading
            for key in self.held.keys() - saved.keys():
                del self.held[key]
            fill(self.held, saved)
        elif isinstance(self.held, list):
            self.held[:] = saved
        else:
            self.held.clear()
            (self.held.update if isinstance(self.held, set) else self.held.extend)(saved)

    def differs(self, saved: Any) -> bool:
        if isinstance(saved, dict):
            return len(saved) != len(self.held) or any(self.held.get(k, MISSING) is not v for k, v in saved.items())
        return len(saved) != len(self.held) or any(a is not b for a, b in zip(self.held, saved, strict=False))


class Values(Held):
    """The numbers of a tensor or array that is written in place; of a tensor its version says whether it was."""

    def take(self) -> Any:
        return (self.held.clone(), self.held._version) if isinstance(self.held, torch.Tensor) else self.held.copy()

    def put(self, saved: Any) -> None:
        if self.differs(saved):
            self.held[...] = saved[0] if isinstance(saved, tuple) else saved

    def differs(self, saved: Any) -> bool:
        if isinstance(saved, tuple):
            return bool(self.held._version != saved[1])
        return not bool(((self.held == saved) | ((self.held != self.held) & (saved != saved))).all())


class Surroundings:
    """What stands around one root module."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.spots = _around(root)
        self.busy: list[Spot] = []  # those that forward passes were seen to change
        self._kept: list[tuple[Spot, Any]] = []
        self._first: list[tuple[Spot, Any]] = []  # of the first micro-batch, where there is another

    def begin(self, everything: bool, again: bool = False) -> None:
        """Take what is there before the first call of a step, or of a further micro-batch in it: all of it in some steps, else what is known to change."""
        self._first = (self._first or self._kept) if again else []
        if everything:
            self.spots, self.busy = ([spot for spot in spots if not _is_orphan(spot)] for spots in (self.spots, self.busy))
        self._kept = taken(self.spots if everything and not again else self.busy)

    def learn(self) -> None:
        """A forward pass is over: note what it has changed."""
        self.busy += [spot for spot, saved in self._kept if spot not in self.busy and _differs(spot, saved)]
        self._kept = [kept for kept in self._kept if kept[0] in self.busy]  # nothing else is held

    def put_back(self) -> None:
        """Put back what forward passes change, for a replay of the step."""
        put(kept for kept in self._kept if kept[0] in self.busy)  # others were perhaps taken for a call that is not over

    def mend(self, alone: bool) -> None:
        """Put back what the forward passes of a dropped step have left bad: to the beginning of the micro-batch, or of its whole step.

        A counter, a cursor, a list of names has gone on, as everything else that the program does in Python. An array
        or a record that stands in a module is put back whatever it holds.
        """
        kept = self._kept if alone or not self._first else self._first
        put((spot, saved) for spot, saved in kept if spot in self.busy and (_is_state(spot) or (holds_bad(spot.take()) and not holds_bad(saved))))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors among what forward passes change."""
        return tensors_among(self.busy)


def _is_state(spot: Spot) -> bool:
    return isinstance(spot, Held) and spot.of_module


def _is_orphan(spot: Spot) -> bool:
    """Whether nobody but us holds a container any more: the program has begun a new one."""
    return isinstance(spot, Held) and sys.getrefcount(spot.held) <= _OURS


def tensors_among(spots: Iterable[Spot]) -> tuple[torch.Tensor, ...]:
    """Return the tensors whose numbers are kept."""
    return tuple(spot.held for spot in spots if isinstance(spot, Values) and isinstance(spot.held, torch.Tensor))


def taken(spots: Iterable[Spot]) -> list[tuple[Spot, Any]]:
    """Return spots with what they hold."""
    return [(spot, spot.take()) for spot in spots]


def arrays_in(attributes: dict[str, Any]) -> list[Spot]:
    """Return the arrays that a module keeps in plain attributes."""
    return [Values(v) for k, v in attributes.items() if k not in _OF_MODULES and _is_array(v)]


def put(kept: Iterable[tuple[Spot, Any]]) -> None:
    """Put back what spots held."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for spot, saved in kept:
            with contextlib.suppress(*_REFUSALS):
                spot.put(saved)


def _differs(spot: Spot, saved: Any) -> bool:
    try:
        return spot.differs(saved)
    except _REFUSALS:
        return False


def _around(root: torch.nn.Module) -> list[Spot]:
    """Find what the code of a model could change outside its modules."""
    search = _Search()
    for module in root.modules():
        search.classes(type(module))
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                search.meet(value, depth=2, direct=False)
    search.follow()
    return list(search.spots.values())


def names_numpy(root: torch.nn.Module) -> bool:
    """Whether the files a model is written in, or those of functions they name, know numpy: its generator's state takes long to look at."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    files = {cls.__module__ for module in root.modules() for cls in type(module).__mro__ if not is_library(cls.__module__)}
    tables = {id(table): table for file in files if (table := getattr(sys.modules.get(file), "__dict__", None)) is not None}
    named = [v for table in tables.values() for v in list(table.values()) if type(v) is FunctionType and not is_internal(v.__code__)]
    tables |= {id(function.__globals__): function.__globals__ for function in named}
    known = (numpy, numpy.random, getattr(numpy.random.rand, "__self__", None))
    return any(any(_behind_method(v) is k for k in known) for table in tables.values() for v in list(table.values()))


def _behind_method(value: Any) -> Any:
    """Return what a method is one of; anything else as it is, without asking it for anything."""
    return value.__self__ if type(value) in (BuiltinFunctionType, MethodType) else value


class _Search:
    def __init__(self) -> None:
        self.spots: dict[Any, Spot] = {}
        self._functions: dict[int, FunctionType] = {}
        self._todo: deque[FunctionType] = deque()
        self._classes: set[type] = set()

    def classes(self, cls: type) -> None:
        """Look at the methods of a class and of those it is made of."""
        for own in cls.__mro__:
            if own not in self._classes and _is_own(own):
                self._classes.add(own)
                for value in vars(own).values():
                    if type(value) in (staticmethod, classmethod):
                        value = value.__func__
                    self._function(value.fget if type(value) is property else value)

    def _function(self, value: Any) -> None:
        if type(value) in (FunctionType, _Cached):  # any other object may do as it likes when it is asked for an attribute
            value = getattr(value, "__wrapped__", value)
        if type(value) is not FunctionType or is_internal(value.__code__) or is_installed(value.__code__):
            return
        if id(value) not in self._functions and len(self._functions) < _MANY:
            self._functions[id(value)] = value
            self._todo.append(value)

    def follow(self) -> None:
        """Look at what functions name, and at the functions among that."""
        while self._todo:
            function = self._todo.popleft()
            table = function.__globals__
            codes = list(codes_in(function.__code__))
            for name in {name for code in codes for name in _stored(code, _STORES)}:
                self.spots[id(table), name] = Name(table, name)
            for name in {name for code in codes for name in code.co_names if name in table}:
                self.meet(table[name], depth=2)
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
            for name in {name for code in codes for name in _stored(code, _STORES_CELL) if name in cells}:
                self.spots[id(cells[name])] = Cell(cells[name])
            for cell in cells.values():
                self.meet(contents(cell), depth=2)

    def meet(self, value: Any, depth: int, direct: bool = True, of_module: bool = False) -> None:
        """A value that code can reach: a function is followed; a container or an object of the program's own may change.

        Not `direct`: it stands in a module, whose attributes are looked after elsewhere. `of_module`: in a record that stands there.
        """
        kind = type(value)
        if kind is FunctionType or kind is MethodType:
            self._function(value.__func__ if kind is MethodType else value)
            value = value.__self__ if kind is MethodType else None
            kind = type(value)
        if issubclass(kind, torch.nn.Module | type) or id(value) in self.spots or not depth:
            if issubclass(kind, type) and _is_own(value):
                self.classes(value)
        elif kind in CONTAINERS:
            if direct and len(value) <= _MOST:
                self.spots[id(value)] = Inside(value, of_module)
            for inner in list(value.values() if kind in TABLES else value)[:64]:
                self.meet(inner, depth - 1, direct, of_module)
        elif (direct and is_small(value) and is_readable(value)) or _is_array(value):
            self.spots[id(value)] = Values(value, of_module or not direct)
        elif kind.__dictoffset__ and (kind is SimpleNamespace or _is_own(kind)):
            of_module = of_module or (not direct and _is_record(value))
            self.spots[id(value)] = Inside(attributes_of(value), of_module)
            self.classes(kind)
            for inner in list(attributes_of(value).values()):
                self.meet(inner, depth - 1, of_module=of_module)


def _is_record(value: Any, depth: int = 3) -> bool:
    """Whether an object is declared as data and holds nothing else: in a module it is state as its attributes are, not a part of the loop that it knows."""
    kind = type(value)
    declared = kind is SimpleNamespace or dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    if not declared or not depth or not hasattr(value, "__dict__"):
        return False
    return all(type(v) in _DATA or _is_array(v) or _is_record(v, depth - 1) for v in vars(value).values())


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.size <= _NUMBERS and value.flags.writeable and value.dtype != object


def _stored(code: CodeType, opcode: int) -> list[str]:
    """Return the names of the variables of a sort that a function sets."""
    if opcode not in code.co_code[::2]:
        return []
    return [str(i.argval) for i in dis.get_instructions(code) if i.opcode == opcode]


def _is_own(cls: type) -> bool:
    """Whether a class stands in a file of the program's own."""
    home = home_of(cls)
    module = sys.modules.get(home) if isinstance(home, str) else None
    return module is not None and is_users(module)
