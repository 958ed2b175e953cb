"""Find the line of plain Python that turns finite values into ones that are not: a data set's own code, torch, numpy or neither.

The function runs once more under Python's line tracing; after each line of the program's own code its variables are looked at.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from whynan.capsule.sites import Site, is_installed, is_internal
from whynan.records import number
from whynan.tripwire.values import holds_bad

PATIENCE = 5.0  # seconds after which the looking ends; the function itself runs on
LARGEST = 64 << 20  # bytes of a value that is still looked at
_SHOWN = 3  # values that are told
_is_bad = functools.partial(holds_bad, largest=LARGEST, wide=64)  # asked of every variable after every line


@dataclass(slots=True)
class Line:
    """The line, and the values it had to compute with."""

    site: Site
    values: list[str]


@dataclass(slots=True)
class _Frame:
    """One call of the program's own code that runs."""

    lines: list[int] = field(default_factory=list)  # where each that ran so far begins, the newest last
    bad: set[str] = field(default_factory=set)  # variables that held such values already


def first_bad_line(call: Callable[[], Any], nan: bool) -> Line | None:
    """Run something and return the first line that makes a NaN, or else an infinity, of finite values; None where they were read in so, or came by chance."""
    watch = _Watch(nan)
    outer = sys.gettrace()
    sys.settrace(watch.called)
    try:
        result = call()
    finally:
        sys.settrace(outer)
    return watch.found if _is_bad(result, nan) else None


class _Watch:
    def __init__(self, nan: bool) -> None:
        self.nan = nan
        self.found: Line | None = None
        self._over = False
        self._frames: dict[FrameType, _Frame] = {}
        self._end = time.monotonic() + PATIENCE

    def called(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A function begins."""
        code = frame.f_code
        if self._over or is_internal(code) or is_installed(code):
            return None
        self._frames[frame] = state = _Frame()
        self._look(frame, state)
        return self._goes_on

    def _goes_on(self, frame: FrameType, event: str, argument: Any) -> Any:
        state = self._frames.get(frame)
        if self._over or state is None:
            return None
        if time.monotonic() > self._end:
            self._over = True
        elif event == "line":
            if self._look(frame, state) and state.lines:
                self._judge(frame, state.lines[-1])
            state.lines.append(frame.f_lasti)
        elif event == "return":
            if self._look(frame, state):
                self._judge(frame, state.lines[-1])
            elif not state.bad and _is_bad(argument, self.nan):
                self._judge(frame, _returning(frame.f_code, state.lines))
            del self._frames[frame]
        return self._goes_on

    def _look(self, frame: FrameType, state: _Frame) -> bool:
        """Whether a variable holds a bad value that it did not hold before."""
        bad = {name for name, value in frame.f_locals.items() if _is_bad(value, self.nan)}
        new = bad - state.bad
        state.bad = bad
        return bool(new)

    def _judge(self, frame: FrameType, lasti: int) -> None:
        """The line that begins here made the first bad value: of finite ones, or it read what was bad already."""
        self._over = True
        read, made_here = dict(used(frame, lasti)), _names(frame.f_code, lasti, "STORE")
        given = {name: value for name, value in read.items() if name not in made_here}
        if read and not any(_is_bad(value, self.nan) for value in given.values()):
            self.found = Line(Site(frame.f_code, lasti), _words(given))


def _returning(code: CodeType, lines: list[int]) -> int:
    """Return the line that made what is returned: the last but one where leaving a `with` takes the frame back to its head."""
    numbers = [next(iter(_line_of(code, lasti))).positions for lasti in lines]
    seen = [place.lineno if place is not None else None for place in numbers]
    return lines[-2] if len(lines) > 1 and seen[-1] in seen[:-1] else lines[-1]


def used(frame: FrameType, lasti: int) -> Iterator[tuple[str, Any]]:
    """Yield what a line computes with: floating-point variables, and such attributes of `self`, by name."""
    owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    own = getattr(owner, "__dict__", {})
    for name in _names(frame.f_code, lasti, "LOAD"):
        held = frame.f_locals.get(name, frame.f_globals.get(name))
        if _is_floating(held):
            yield name, held
    for step in _line_of(frame.f_code, lasti):
        if step.opname == "LOAD_ATTR" and step.argval in own and _is_floating(own[step.argval]):
            yield f"self.{step.argval}", own[step.argval]


def _names(code: CodeType, lasti: int, what: str) -> list[str]:
    """Return the variables that a line loads, or stores; one instruction may do two of them, from Python 3.13 on."""
    found: list[str] = []
    for step in _line_of(code, lasti):
        done = re.findall(r"(LOAD|STORE)_(?:FAST|DEREF|GLOBAL|NAME)", step.opname)
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        found += [name for kind, name in zip(done, names, strict=False) if kind == what]
    return list(dict.fromkeys(found))


def _line_of(code: CodeType, lasti: int) -> list[dis.Instruction]:
    """Return the instructions of the line that one belongs to."""
    listed = list(dis.get_instructions(code))
    wanted = next((i.positions.lineno for i in listed if i.offset == lasti and i.positions is not None), None)
    return [i for i in listed if i.positions is not None and i.positions.lineno == wanted]


def _is_floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, float) or getattr(getattr(value, "dtype", None), "kind", "") == "f"  # an array or a number of numpy's


def _words(values: dict[str, Any]) -> list[str]:
    """Tell the single values, and what is the same throughout; zeros first."""
    told = [(name, value, constant) for name, value in values.items() if (constant := _constant(value)) is not None]
    told.sort(key=lambda item: item[2] != 0)
    return [f"{name} is {number(constant)}" + ("" if _count(value) == 1 else " throughout") for name, value, constant in told[:_SHOWN]]


def _count(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else int(getattr(value, "size", 1))


def _constant(value: Any) -> float | None:
    """Return the one number that a value is, or holds everywhere."""
    if isinstance(value, float) and not hasattr(value, "dtype"):
        return value
    if not _count(value) or _count(value) * value.dtype.itemsize > LARGEST:
        return None
    low, high = float(value.min()), float(value.max())
    return low if low == high else None
