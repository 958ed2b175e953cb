"""A static pass over the exported step: which operations can leave their domain, and the path that proves it.

Ranges are one interval for each tensor, from the ranges of the inputs and the actual weights (as RANUM does, coarser).
What is listed can perhaps not happen; what is not listed cannot, as long as every operation is known.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whynan.capsule.sites import live_site, positions, shorten
from whynan.probing.attacking import Attacks
from whynan.probing.inputs import Input
from whynan.probing.intervals import ANY, Interval
from whynan.probing.operations import KEEPING, OPERATIONS, Seen, same
from whynan.probing.results import Group, Verdict
from whynan.probing.steps import SubjectStep, values_of

SHOWN = 6  # operations told; the rest is counted
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Hazard:
    """An operation that can leave its domain, with the chain of ranges that leads to it."""

    operation: str
    argument: Interval
    why: str
    place: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        chain = " <- ".join(self.path)
        return f"{self.operation} of {self.argument} {self.why}; {chain}"


@dataclass(frozen=True, slots=True)
class Ranges:
    """What the pass found."""

    hazards: tuple[Hazard, ...]
    operations: int
    unknown: dict[str, int]


def ranges_of(step: SubjectStep) -> Ranges:
    """Export the step and walk its graph. Raises what `torch.export` raises.

    Cost: one export, seconds for a small model.
    """
    values = tuple(v.detach() for v in values_of(step))
    with step.still(), _silence():
        program = torch.export.export(_Whole(step), values, strict=False)
    return _Walk(program, step, _places(step, values)).run()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what export says on the way to itself; a failure is told in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


class _Sites(TorchDispatchMode):
    """Notes the user's line of every operation with a domain: the exported graph knows only those of modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in _DOMAINS or name == "pow":
            site = live_site(_places.__code__)
            self.places.setdefault(name, []).append(f"{shorten(site.code.co_filename)}:{positions(site)[0]}" if site is not None else "")
        return func(*args, **(kwargs or {}))


def _places(step: SubjectStep, values: tuple[torch.Tensor, ...]) -> dict[str, list[str]]:
    mode = _Sites()
    with step.still(), mode:
        step.loss(values)
    return mode.places


class _Whole(torch.nn.Module):
    """The step as one module, from the tensors of the batch to the loss."""

    def __init__(self, step: SubjectStep) -> None:
        super().__init__()
        self.inner = step.subject.model
        self._step = step

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self._step.loss(values)


class _Walk:
    def __init__(self, program: Any, step: SubjectStep, places: dict[str, list[str]]) -> None:
        self.program, self.step = program, step
        self.places = self._matched(places)
        self.known: dict[Any, Interval] = {}
        self.tensors: dict[Any, torch.Tensor] = {}
        self.found: list[Hazard] = []
        self.unknown: dict[str, int] = {}
        self.count = 0

    def run(self) -> Ranges:
        self._begin()
        for node in self.program.graph.nodes:
            if node.op == "call_function" and not _name(node).startswith("_assert"):
                self.count += 1
                self.known[node] = self._apply(node)
        return Ranges(tuple(self.found), self.count, self.unknown)

    def _matched(self, places: dict[str, list[str]]) -> dict[Any, str]:
        """Give the n-th node of an operation the line of its n-th run, where both are as many."""
        found: dict[Any, str] = {}
        for name, lines in places.items():
            nodes = [n for n in self.program.graph.nodes if n.op == "call_function" and _name(n) == name]
            if len(nodes) == len(lines):
                found.update(zip(nodes, lines, strict=True))
        return found

    def _begin(self) -> None:
        signature = self.program.graph_signature
        state = {**dict(self.program.named_parameters()), **dict(self.program.named_buffers()), **self.program.constants}
        homes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        given = iter(self.step.inputs)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            tensor = state.get(homes.get(node.name, ""))
            if isinstance(tensor, torch.Tensor):
                self.tensors[node], self.known[node] = tensor, _observed(tensor)
            else:
                self.known[node] = _stated(next(given, None))

    def _apply(self, node: Any) -> Interval:
        name = _name(node)
        seen = Seen(node, [self._read(a) for a in node.args], node.kwargs, self.tensors, self.known)
        for place, why in _unsafe(name, seen):
            where = self.places.get(node) or _place(node)
            self.found.append(Hazard(name, seen.at(place), why, where, tuple(self._path(node.args[place]))))
        rule = OPERATIONS.get(name)
        if rule is None:
            self.unknown[name] = self.unknown.get(name, 0) + 1
            return ANY
        try:
            made = rule(seen)
        except (IndexError, TypeError, AttributeError, KeyError, ValueError, OverflowError):
            self.unknown[name] = self.unknown.get(name, 0) + 1
            return ANY
        if name in _VIEWS and seen.tensor(0) is not None:
            self.tensors[node] = seen.tensor(0)  # type: ignore[assignment]
        return made

    def _read(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.known.get(argument, ANY)
        if isinstance(argument, bool | int | float):
            return Interval(float(argument), float(argument))
        if isinstance(argument, list | tuple):
            return [self._read(a) for a in argument]
        return argument

    def _path(self, node: Any) -> list[str]:
        """Follow an operand back to an input, at each operation along its widest operand."""
        words: list[str] = []
        while len(words) < 8 and isinstance(node, torch.fx.Node):
            words.append(f"{_name(node) if node.op == 'call_function' else self._given(node)} {self.known.get(node, ANY)}")
            before = [a for a in node.all_input_nodes if a in self.known][: 1 if _name(node) in KEEPING else None]
            node = max(before, key=lambda n: (n not in self.tensors, self.known[n].size)) if before else None
        return words

    def _given(self, node: Any) -> str:
        found = re.fullmatch(r"values_(\d+)", node.name)
        if found is not None and int(found[1]) < len(self.step.inputs):
            return self.step.inputs[int(found[1])].name
        return str(node.name).removeprefix("p_inner_").removeprefix("b_inner_")


_VIEWS = frozenset({"t", "transpose", "permute", "view", "reshape", "detach", "alias", "clone"})


def _name(node: Any) -> str:
    parts = str(node.target).split(".")
    return parts[1] if len(parts) > 1 else str(getattr(node.target, "__name__", parts[0]))


def _stated(given: Input | None) -> Interval:
    if given is None:
        return ANY
    if given.value.dtype is torch.bool:
        return Interval(0, 1)
    found = Interval(given.low, given.high)
    return found if given.ignore is None else found | Interval(given.ignore, given.ignore)


def _observed(tensor: torch.Tensor) -> Interval:
    if not tensor.numel() or tensor.is_complex():
        return ANY
    wide = tensor.detach().double()
    return Interval(float(wide.min()), float(wide.max())) if bool(torch.isfinite(wide).all()) else ANY


def _place(node: Any) -> str:
    """Return file and line of the user's code that made an operation."""
    frames = [(f, n) for f, n in _FRAME.findall(node.meta.get("stack_trace") or "") if f"{torch.__path__[0]}" not in f and "/whynan/probing/" not in f]
    return f"{shorten(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _zero(x: Interval) -> str:
    return "reaches 0" if 0 in x else ""


def _positive(x: Interval) -> str:
    return "can be negative" if x.low < 0 else "reaches 0" if x.low == 0 else ""


def _one(x: Interval) -> str:
    return "can leave [-1, 1]" if x.low < -1 or x.high > 1 else ""


_DOMAINS: dict[str, tuple[int, Callable[[Interval], str]]] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma"), (0, _positive)),
    "log1p": (0, lambda x: "can be below -1" if x.low < -1 else "reaches -1" if x.low == -1 else ""),
    **dict.fromkeys(("div", "div_", "remainder", "fmod"), (1, _zero)),
    "reciprocal": (0, _zero),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (0, _one)),
    "exp": (0, lambda x: "can exceed 88.7" if x.high > 88.72 else ""),
    "expm1": (0, lambda x: "can exceed 88.7" if x.high > 88.72 else ""),
}


def _unsafe(name: str, seen: Seen) -> list[tuple[int, str]]:
    """Return which argument can leave the operation's domain, and how."""
    if name == "pow":
        exponent, base = seen.number(1), seen.at(0)
        why = "reaches 0" if exponent is not None and exponent < 1 and 0 in base else ""
        why = "can be negative" if exponent is not None and exponent != int(exponent) and base.low < 0 else why
        return [(0, why)] if why else []
    place, rule = _DOMAINS.get(name, (0, same))
    argument = seen.args[place] if place < len(seen.args) else None
    why = rule(argument) if isinstance(argument, Interval) else ""
    return [(place, why)] if why else []


def verdict_of(attacks: Attacks) -> Verdict:
    """Run the pass and sum it up; each place that can leave its domain is a note."""
    try:
        found = ranges_of(attacks.step)
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        attacks.note(Group.RANGES, "torch.export failed", f"{type(error).__name__}: {words[:160]}")
        return Verdict(Group.RANGES, "not run", "torch.export failed; the note says why")
    places: dict[tuple[str, str], Hazard] = {}
    for hazard in found.hazards:
        places.setdefault((hazard.place, hazard.operation), hazard)
    for (place, _), hazard in list(places.items())[:SHOWN]:
        attacks.note(Group.RANGES, place or hazard.operation, str(hazard))
    strange = sum(found.unknown.values())
    if strange:
        names = ", ".join(f"{name} {times}" for name, times in sorted(found.unknown.items()))
        attacks.note(Group.RANGES, "unknown operations", f"{strange} of {found.operations} are not known to this pass, their results can be anything: {names}")
    state = f"{len(places)} note{'s' if len(places) > 1 else ''}" if places else "ok"
    words = f"{len(places) or 'none'} of {found.operations} operations can leave the domain"
    return Verdict(Group.RANGES, state, words + (f", {strange} unknown" if strange else ""))
