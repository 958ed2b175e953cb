"""Named values with limits: `track={"*.alpha": {"below": 1.0}}` says that every alpha is to stay below 1.

A pattern (as in file names: `*`, `?`, `[abc]`) is compared with the full names of parameters and buffers (`blocks.0.alpha`) and with
the number-valued entries of optimizer groups (`lr`, `weight_decay`). `*.alpha` also finds an `alpha` of the model itself. A pattern that
begins with `out:` is compared with the names of modules (`out:blocks.0`; the model itself goes by its class) and means the largest absolute
value of the floating-point tensors that such a module returns in a step.

- `"below": 1.0`  every element is to stay below 1.0; the warning comes when the largest one is 1.0 or more
- `"above": 0.0`  every element is to stay above 0.0; the warning comes when the smallest one is 0.0 or less
- `"grows": 10`   the largest absolute value is to stay below 10 times the median of its first five looks
- `"every": 10`   look at every tenth step; left out: each step for up to 1024 elements, else every 100 steps; every 16 for outputs

Each crossing warns once; a value that came back within its limits may warn again.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Protocol

import torch

from whynan.errors import UsageError
from whynan.records import Notice, NoticeKind, number
from whynan.tripwire.late import LateNumbers
from whynan.tripwire.values import largest, plain

Track = Mapping[str, Mapping[str, float]]
OUTPUT = "out:"  # begins the name of what a module returns
_LOOKS = 5  # whose median is the level that growth is measured from
_SMALL = 1024
_RESOLVE_EVERY = 100  # steps between two looks at which names exist: modules can be made later


@dataclass(frozen=True, slots=True)
class Limit:
    """One pattern with its limits."""

    pattern: str
    below: float | None = None
    above: float | None = None
    grows: float | None = None
    every: int = 0

    @property
    def of_outputs(self) -> bool:
        """Whether it is about what modules return."""
        return self.pattern.startswith(OUTPUT)

    def matches(self, name: str) -> bool:
        """Whether a name is meant.

        >>> [Limit("out:*.mix").matches(name) for name in ("out:blocks.0.mix", "out:mix", "blocks.0.mix")]
        [True, True, False]
        """
        if self.of_outputs is not name.startswith(OUTPUT):
            return False
        name, pattern = name.removeprefix(OUTPUT), self.pattern.removeprefix(OUTPUT)
        return fnmatchcase(name, pattern) or fnmatchcase("." + name, pattern)


class Heard(Protocol):
    """Who knows what modules returned."""

    def heard(self) -> Iterator[tuple[str, str, torch.Tensor | float]]: ...


@dataclass(frozen=True, slots=True)
class Target:
    """One value with the limit it is held to; `read` gives the value of now, as modules may replace their tensors."""

    name: str
    limit: Limit
    read: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Side:
    """One comparison under way."""

    step: int
    name: str
    limit: Limit
    word: str  # below, above or grows


def limits_of(track: Track | None) -> list[Limit]:
    """Read the `track` option; what makes no sense is a `UsageError` in one line.

    >>> limits_of({"*.alpha": {"below": 1.0, "above": 0.0}})
    [Limit(pattern='*.alpha', below=1.0, above=0.0, grows=None, every=0)]
    """
    if track is None:
        return []
    if not isinstance(track, Mapping):
        raise UsageError(f'track is a mapping such as {{"*.alpha": {{"below": 1.0}}}}, not {type(track).__name__}')
    return [_limit(pattern, given) for pattern, given in track.items()]


def _limit(pattern: object, given: object) -> Limit:
    if not isinstance(pattern, str) or not pattern.removeprefix(OUTPUT):
        raise UsageError(f'track: a pattern is a name such as "*.alpha", not {pattern!r}')
    if not isinstance(given, Mapping) or not {"below", "above", "grows"} & given.keys():
        raise UsageError(f'track: {pattern!r} needs limits such as {{"below": 1.0}}, not {given!r}')
    for word, value in given.items():
        _checked(pattern, word, value)
    below, above = given.get("below"), given.get("above")
    if below is not None and above is not None and above >= below:
        raise UsageError(f"track: no value of {pattern!r} is above {above} and below {below}; swap the two limits")
    return Limit(pattern, below, above, given.get("grows"), given.get("every", 0))


def _checked(pattern: str, word: object, value: object) -> None:
    if word not in ("below", "above", "grows", "every"):
        raise UsageError(f"track: {pattern!r} has an unknown limit {word!r}; choose from below, above, grows, every")
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UsageError(f"track: {word!r} of {pattern!r} is a number, not {value!r}")
    if word == "every" and (not isinstance(value, int) or value < 1):
        raise UsageError(f"track: 'every' of {pattern!r} is a whole number of steps from 1 on, not {value!r}")
    if word == "grows" and not 1 < value < math.inf:
        raise UsageError(f"track: 'grows' of {pattern!r} is a factor above 1, not {value!r}")


class Tracker:
    """Holds named values to their limits.

    >>> model = torch.nn.PReLU(init=2.0)
    >>> [notice.text for notice in Tracker({"weight": {"below": 1.0}}).look(0, [model], [])]
    ['weight is 2 at step 0; it was to stay below 1']

    Cost: one small reduction for each tensor, limit and look (about 8 microseconds on the CPU); no host sync on CUDA, where
    the answer comes at a later call.
    """

    def __init__(self, track: Track | None, outputs: Heard | None = None) -> None:
        self._limits = limits_of(track)
        self._of_outputs = [limit for limit in self._limits if limit.of_outputs]
        self._outputs = outputs
        self._first: dict[tuple[str, str, str], list[float]] = {}  # looks that make the level of a growth
        self._targets: list[Target] = []
        self._known: tuple[int, ...] = ()
        self._outside: set[tuple[str, str, str]] = set()
        self._complained = False
        self._late = LateNumbers()

    def look(self, step: int, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], wait: bool = False) -> list[Notice]:
        """Compare what is due at this step, and what has arrived from earlier ones."""
        if not self._limits:
            return []
        notices = self._resolve(step, models, optimizers, wait)
        notices += self._judge_arrived(wait)
        return notices + self._compare(step)

    def _resolve(self, step: int, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], wait: bool) -> list[Notice]:
        owners = (*map(id, models), *map(id, optimizers))
        if not (models or (wait and step)) or (owners == self._known and step % _RESOLVE_EVERY):
            return []
        self._known = owners
        named = list(_named(models, optimizers)) if len(self._of_outputs) < len(self._limits) else []
        self._targets = [Target(label, limit, read) for limit in self._limits for name, label, read in named if limit.matches(name)]
        modules = [name for model in models for name, _ in module_names(model)] if self._of_outputs and not self._complained else []
        return self._complaints(step, [*(name for name, _, _ in named), *modules])

    def _complaints(self, step: int, names: list[str]) -> list[Notice]:
        """Name the patterns that match nothing, once, when the model is first known."""
        if self._complained:
            return []
        self._complained = True
        missing = [limit for limit in self._limits if not any(limit.matches(name) for name in names)]
        return [Notice(NoticeKind.LIMIT, step, m.pattern, None, f"track: no value is named {m.pattern!r}{_similar(m, names)}") for m in missing]

    def _compare(self, step: int) -> list[Notice]:
        notices: list[Notice | None] = []
        sent: list[tuple[object, torch.Tensor]] = []
        for name, limit, value in [*self._due(step), *self._heard()]:
            for word in _words(limit):
                side, extreme = _Side(step, name, limit, word), _extreme(value, word)
                if isinstance(extreme, torch.Tensor):
                    sent.append((side, extreme))
                elif extreme is not None:
                    notices.append(self._judge(side, extreme))
        self._late.send(sent)
        return [*filter(None, notices), *self._judge_arrived()]

    def _due(self, step: int) -> Iterator[tuple[str, Limit, object]]:
        """Yield the values of now; while earlier ones are under way there is no hurry."""
        for target in self._targets if not self._late.under_way else ():
            value = target.read()
            if value is not None and not step % _every(target, value):
                yield target.name, target.limit, value

    def _heard(self) -> Iterator[tuple[str, Limit, object]]:
        """Yield what modules returned in this step: they are listened to only when it is due, and not again soon."""
        for name, label, value in self._outputs.heard() if self._outputs is not None and self._of_outputs else ():
            for limit in self._of_outputs:
                if limit.matches(name):
                    yield label, limit, value

    def _judge_arrived(self, wait: bool = False) -> list[Notice]:
        found = [self._judge(side, value) for side, value in self._late.take(wait) if isinstance(side, _Side)]
        return [notice for notice in found if notice is not None]

    def _judge(self, side: _Side, value: float) -> Notice | None:
        if not math.isfinite(value):
            return None  # the tripwire's business
        key = (side.limit.pattern, side.name, side.word)
        value = abs(value) if side.word == "grows" else value
        level = self._level(key, value) if side.word == "grows" else 1.0
        given = getattr(side.limit, side.word)
        if level is None:
            return None
        bound = level * given
        if value > bound if side.word == "above" else value < bound:
            self._outside.discard(key)
            return None
        if key in self._outside:
            return None
        self._outside.add(key)
        text = f"{side.name} is {number(value)} at step {side.step}; it was to stay {side.word} {number(bound)}"
        if side.word == "grows":
            grown = f"{number(value / level)} times the {number(level)} of its first looks"
            text = f"{side.name} is {number(value)} at step {side.step}, {grown}; it was to stay below {number(given)} times"
        return Notice(NoticeKind.LIMIT, side.step, side.name, value, text)

    def _level(self, key: tuple[str, str, str], value: float) -> float | None:
        """Return what growth is measured from, once it is known; zeros, as of layers that begin with them, are no level."""
        first = self._first.setdefault(key, [])
        if len(first) == _LOOKS:
            return median(first)
        if value:
            first.append(value)
        return None


def module_names(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the names that patterns for outputs are compared with, and their modules; the outermost one goes by its class."""
    for name, module in root.named_modules():
        yield OUTPUT + (name or type(getattr(module, "_orig_mod", module)).__name__), module


def _named(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield name, name to print, and how to read each value there is."""
    seen: set[tuple[int, str]] = set()
    for model in models:
        for prefix, module in model.named_modules():
            for store in (module._parameters, module._buffers):
                for key in store:
                    if (id(store), key) not in seen:
                        seen.add((id(store), key))
                        name = f"{prefix}.{key}" if prefix else key
                        yield name, name, _reader(store, key)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        for key, value in group.items():
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool):
                yield key, key if len(groups) == 1 else f"{key} of group {index}", _reader(group, key)


def _reader(store: Mapping[str, object], key: str) -> Callable[[], object]:
    return lambda: store.get(key)


def _every(target: Target, value: object) -> int:
    if target.limit.every:
        return target.limit.every
    return 100 if isinstance(value, torch.Tensor) and value.numel() > _SMALL else 1


def _words(limit: Limit) -> list[str]:
    return [word for word in ("below", "above", "grows") if getattr(limit, word) is not None]


def _extreme(value: object, word: str) -> torch.Tensor | float | None:
    """Return the value nearest to the limit: the largest for below, the smallest for above, the largest absolute one for growth."""
    if isinstance(value, int | float):
        return float(value)
    dense = plain(value.detach()) if isinstance(value, torch.Tensor) else None
    if dense is None or not dense.numel() or dense.is_complex() or dense.device.type == "meta":
        return None
    if dense.element_size() == 1 and dense.is_floating_point():
        dense = dense.float()  # float8 has no arithmetic
    extreme = dense if dense.numel() == 1 else largest(dense) if word == "grows" else dense.amax() if word == "below" else dense.amin()
    return float(extreme) if extreme is not None and extreme.device.type == "cpu" else extreme


def _similar(limit: Limit, names: list[str]) -> str:
    near = difflib.get_close_matches(limit.pattern, [n for n in names if n.startswith(OUTPUT) is limit.of_outputs], n=3, cutoff=0.3)
    return f"; similar names: {', '.join(near)}" if near else ""
