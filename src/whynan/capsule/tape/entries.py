"""What is written on the tape: a call, and for each tensor it reads how to get it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from whynan.capsule.sites import Site
from whynan.capsule.state.generators import States
from whynan.capsule.tape.facts import version_of


@dataclass(slots=True, unsafe_hash=True)  # never changed; a frozen one takes twice as long to make
class Slot:
    """The n-th tensor in the result of an entry."""

    entry: int
    index: int


class Carried(Protocol):
    """What a dropped step began with, see `recovery/carried.py`."""

    def goes_on(self) -> bool: ...
    def puts_back(self, site: Site | None, number: int, reads: Sequence[Slot | Inner | Outside], grad: bool, args: Any) -> bool: ...
    def leaves_out(self, target: torch.Tensor, sources: Any) -> bool: ...


class Made(weakref.ref[torch.Tensor]):
    """A tensor that an entry made, while the program holds it."""

    __slots__ = ("slot",)
    slot: Slot


@dataclass(frozen=True, slots=True)
class Inner:
    """A tensor born inside an entry and picked up elsewhere (a stashed auxiliary loss, a captured feature map).

    It is found again by the distance of its autograd node from the entry's first node.
    """

    entry: int
    offset: int
    output_nr: int


@dataclass(slots=True)
class Outside:
    """A tensor that no entry made: batch, parameter, constant. Its version tells whether it was changed since."""

    tensor: torch.Tensor
    version: int
    saved: torch.Tensor | None = None  # its value before the first change, where one was seen coming
    written: bool = False  # the step itself writes to it, perhaps through a view: a replay works on a copy
    writer: int = 0  # the entry that was the first to
    carried: bool = False  # made by the program in an earlier step
    handed: bool = False  # an input though it has a gradient, as a capsule says

    @property
    def changed(self) -> bool:
        return self.saved is None and version_of(self.tensor) != self.version

    def value(self) -> torch.Tensor:
        return self.tensor if self.saved is None else self.saved


class Entry:
    """One recorded call. What is seldom known of one is what the class says until it is set: several are made in every step."""

    rng: Any = None
    generators: States | tuple[()] = ()  # of the program's own
    last_node: int = 0
    outputs: int = 0
    needs_grad: bool = False
    reaches_back: bool = False  # its history begins in an earlier step
    refs: Sequence[Made] = ()
    wanted: set[tuple[int, int]] | frozenset[tuple[int, int]] = frozenset()  # of the tensors born inside, those that are picked up elsewhere
    caught: dict[tuple[int, str, int], tuple[int, int]] | None = None  # which call of the first replay, by number and name, and which of its results they were
    left: dict[Inner, tuple[torch.nn.Module, str]] | None = None  # of those, the ones that stand in an attribute of a module
    error: str = ""
    apart: bool | None = False  # computes with results of the step that were not handed to it; None where that is to be asked
    given: tuple[tuple[dict[str, Any], str, Any], ...] = ()  # attributes and parameters of the called module that the loop has set
    within: Within | None = None  # made by a hook of a module, inside another call
    uses: tuple[torch.nn.Module, ...] = ()  # models that a call recorded whole runs
    caller: Site | None = None  # the line of the program that called the library which made this call

    def __init__(
        self,
        number: int,
        kind: str,  # module | call | write | grad | backward | derivative | clip | zero | optimizer | function
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: Site | None,
        grad_enabled: bool,
        autocast: tuple[tuple[str, bool, torch.dtype], ...],
        reads: Sequence[Slot | Inner | Outside] = (),  # every tensor among the arguments; these themselves where they are nothing else
        first_node: int = 0,
    ) -> None:
        self.number, self.kind, self.fn, self.args, self.kwargs = number, kind, fn, args, kwargs
        self.site, self.grad_enabled, self.autocast, self.reads, self.first_node = site, grad_enabled, autocast, reads, first_node

    @property
    def name(self) -> str:
        """What was called: the class of a module, the name of a function."""
        return type(self.fn).__name__ if hasattr(self.fn, "forward") else getattr(self.fn, "__name__", str(self.fn))

    @property
    def runs_model(self) -> bool:
        """Whether this is the call of a model, or a call recorded whole that runs one."""
        return self.kind == "module" or bool(self.uses)


@dataclass(frozen=True, slots=True)
class Within:
    """The call that was in progress when a hook made calls of its own, and the module whose hook it was."""

    entry: Entry
    module: torch.nn.Module
    made: dict[Slot, torch.Tensor]  # of its arguments, those that the step itself made: they may be gone when somebody asks

    @property
    def name(self) -> str:
        """The path of that module in the model that was called."""
        root = self.entry.fn
        names = root.named_modules() if isinstance(root, torch.nn.Module) else ()
        return next((name for name, module in names if module is self.module), "") or type(self.module).__name__


def target_of(entry: Entry) -> object:
    """Return what a call writes to: `out`, or its first argument, by position or by name."""
    if (out := entry.kwargs.get("out")) is not None:
        return out[0] if isinstance(out, list | tuple) else out
    return entry.args[0] if entry.args else next(iter(entry.kwargs.values()), None)


def dependencies(entry: Entry) -> Iterator[int]:
    """Yield the numbers of the entries whose results this one reads or writes."""
    for kept in entry.reads:
        if not isinstance(kept, Outside):
            yield kept.entry
