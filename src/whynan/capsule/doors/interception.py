"""Stand at the doors of torch while watching: module calls, backward, optimizers, clipping, loaders, opaque transforms.

Every door is one attribute of torch replaced by a wrapper and put back on leaving. A wrapper does nothing but ask
"is this call to be recorded here?" and otherwise calls the original.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from whynan.capsule.doors.collectives import watch_collectives
from whynan.capsule.doors.compiled import CompiledFunctions, skip_frame
from whynan.capsule.doors.engine import Doors
from whynan.capsule.doors.following import watch_followers, watch_moves, watch_scaler
from whynan.capsule.doors.gradients import watch_backward, watch_gradients
from whynan.capsule.doors.hooks import Hooks
from whynan.capsule.doors.labels import watch_labels
from whynan.capsule.doors.loaders import watch_loaders
from whynan.capsule.doors.modules import watch_hooks, watch_layers, watch_module_state, watch_modules
from whynan.capsule.doors.opaque import watch_compiler, watch_functions, watch_own_functions, watch_scripts, watch_subclasses
from whynan.capsule.doors.optimizers import watch_optimizers, watch_schedulers
from whynan.capsule.doors.transforms import watch_transforms
from whynan.capsule.imports import is_users
from whynan.capsule.recorder import Recorder
from whynan.capsule.unseen import leave_out, unseen

_MISSING = object()


@dataclass(slots=True, eq=False)
class _Door:
    """One replaced attribute."""

    owner: Any
    name: str
    original: Any
    wrapper: Any
    lasting: bool  # stands until the guard is closed, also when watching is off


class Reach:
    """What the wrappers on the program's own classes hold of the engine.

    cloudpickle takes such a class by value, wrappers and all, to a process that may have no whynan: there nothing is within
    reach (`recorder` is None), and a wrapper calls the original.
    """

    __slots__ = ("doors", "interception", "recorder")
    leave_out = staticmethod(leave_out)

    def __init__(self, interception: Interception) -> None:
        self.interception = interception
        self.doors = interception.doors
        self.recorder: Recorder | None = interception.doors.recorder

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"recorder": None}


@unseen
class Interception:
    """The set of replaced attributes; `remove` leaves torch exactly as it was."""

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.reach = Reach(self)
        self._undo: list[_Door] = []
        self.registered: list[Any] = []  # handles of torch's own hooks
        _made.add(self)
        self.hooks = Hooks(doors.recorder)
        self.compiled = CompiledFunctions(doors, self.hooks)

    def install(self) -> None:
        """Replace the doors."""
        for watch in (
            watch_modules,
            watch_functions,
            watch_backward,
            watch_gradients,
            watch_optimizers,
            watch_module_state,
            watch_schedulers,
            watch_scaler,
            watch_followers,
            watch_own_functions,
            watch_subclasses,
            watch_scripts,
            watch_transforms,
            watch_compiler,
            watch_loaders,
            watch_collectives,
            watch_labels,
            watch_hooks,
            watch_layers,
        ):
            watch(self)
        self._imported_before()

    def remove(self, lasting: bool = True) -> None:
        """Put every original back, last first; those that must stand for the other ranks' sake only if told to."""
        self.hooks.remove()
        self.compiled.remove()
        for handle in self.registered:
            handle.remove()
        self.registered.clear()
        doors, self._undo = self._undo, [door for door in self._undo if door.lasting and not lasting]
        for door in reversed([door for door in doors if door not in self._undo]):
            _take_down(door)

    def replace(self, owner: Any, name: str, wrapper: Any, lasting: bool = False) -> None:
        """Put a wrapper in place of an attribute, remembering what stood there."""
        held = owner.__dict__ if hasattr(owner, "__dict__") else {}
        self._undo.append(_Door(owner, name, held.get(name, _MISSING), wrapper, lasting))
        skip_frame(wrapper)
        setattr(owner, name, wrapper)

    def _imported_before(self) -> None:
        """Do the same for functions that the program's own files have imported by name before watching began: `from torch.func import grad`.

        Not where the program has compiled something already, which might use these names: it would be compiled again.
        """
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["stats"]["unique_graphs"]:
            return
        doors = {id(door.original): door for door in self._undo if isinstance(door.owner, ModuleType)}
        for module in list(sys.modules.values()):
            if type(module) is not ModuleType or module.__name__.startswith("whynan."):
                continue
            found = [(name, door) for name, value in list(vars(module).items()) if (door := doors.get(id(value))) is not None]
            for name, door in found if found and is_users(module) else ():
                self.replace(module, name, door.wrapper)

    def watch_moves_of(self, cls: type[torch.optim.lr_scheduler.LRScheduler]) -> None:
        """Do the same for a scheduler class and those it is made of: one written after watching began."""
        for own in cls.__mro__:
            if issubclass(own, torch.optim.lr_scheduler.LRScheduler):
                watch_moves(self, own, "step")


_made: weakref.WeakSet[Interception] = weakref.WeakSet()


def _take_down(door: _Door) -> None:
    """Put an original back; where another thread's guard stands on top, it is the one that will."""
    for other in list(_made):
        for above in other._undo:
            if above.original is door.wrapper and above.owner is door.owner and above.name == door.name:
                above.original = door.original
                return
    if door.original is _MISSING:
        delattr(door.owner, door.name)
    else:
        setattr(door.owner, door.name, door.original)
