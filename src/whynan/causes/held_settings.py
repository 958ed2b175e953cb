"""The numbers in an optimizer's groups that guard its update: which of them is 0, and the update with another one in its place.

A group may hold a guard as a number, as a tensor of one, in a tuple (Adafactor, CAME: one for each denominator), as None or as a word.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whynan.causes.edits import with_keyword
from whynan.causes.scopes import last_name
from whynan.records import Remedy, number_of

if TYPE_CHECKING:
    from whynan.causes.catalogue import Scene
    from whynan.causes.source import Change, Expression

GUARD = re.compile(r"eps|damp|ridge|jitter|tiny|regulari", re.IGNORECASE)  # epsilon, eps_root, damping
TRIED = 3  # guards that are 0 which are tried, one by one
_SMALLEST = {"float16": 2.98e-8, "bfloat16": 4.6e-41, "float32": 7.0e-46}


@dataclass(frozen=True, slots=True)
class Setting:
    """One number of an optimizer's groups, or one of several that stand there together."""

    key: str
    place: int | None
    value: float
    whole: Any
    usual: Any = None  # what the class of the optimizer gives it by itself; None where that is not known

    @property
    def name(self) -> str:
        return self.key if self.place is None else f"{self.key}[{self.place}]"

    def is_lost(self, dtype: str) -> bool:
        """Whether it is 0 in a dtype."""
        return self.value == 0 or rounds_to_zero(self.value, dtype)

    def became(self, dtype: str) -> str:
        """Say that it is 0.

        >>> Setting("eps", None, 0.0, 0).became("float32"), Setting("eps", 0, 1e-8, (1e-8, 1)).became("float16")
        ('eps is 0', 'eps[0] is 1e-08, which is 0 in float16')
        """
        return f"{self.name} is {'0' if self.value == 0 else f'{self.value}, which is 0 in {dtype}'}"

    def instead(self, number: float) -> Any:
        """Return what the group would hold with another number."""
        if self.place is None:
            return number
        return type(self.whole)(number if place == self.place else value for place, value in enumerate(self.whole))

    def larger(self, dtype: str) -> list[float]:
        """Return the numbers to try instead: the optimizer's own, and one that exists in the dtype and is of use there."""
        own = number_of(self.usual if self.place is None or not isinstance(self.usual, list | tuple) else (*self.usual, None)[self.place])
        known = [own] if own is not None and own > self.value and not rounds_to_zero(own, dtype) else []
        enough = 1e-4 if dtype == "float16" else 1e-8
        return list(dict.fromkeys([*known, *([enough] if enough > self.value else [])]))


class With:
    """Another value in every group of an optimizer that has a certain one, for a while."""

    def __init__(self, groups: list[dict[str, Any]], key: str, value: Any) -> None:
        self.groups, self.key, self.value = groups, key, value
        self.before = [group[key] for group in groups]

    def __enter__(self) -> None:
        for group in self.groups:
            group[self.key] = self.value

    def __exit__(self, *_: object) -> None:
        for group, value in zip(self.groups, self.before, strict=True):
            group[self.key] = value


def guards(optimizer: Any) -> list[Setting]:
    """Return the guards in an optimizer's groups, or in its own attributes where the groups have none."""
    kind = type(optimizer)
    for places in (optimizer.param_groups, [vars(optimizer)]):
        found = [s for held in places for key, value in held.items() if isinstance(key, str) and GUARD.search(key) for s in _numbers(kind, key, value)]
        if found:
            once = {(s.key, s.place, repr(s.whole)): s for s in found}
            return sorted(once.values(), key=lambda s: "eps" not in s.key)
    return []


def tried(scene: Scene, setting: Setting, dtype: str) -> Remedy | None:
    """Replay the update with another number; the diff is at the optimizer's construction. Nothing where there is no better one."""
    lab = scene.lab
    assert lab is not None
    remedy = None
    for number in setting.larger(dtype):
        outcome = lab.run(around=With(_holding(scene.optimizer, setting), setting.key, setting.instead(number)))
        text = written(setting.instead(number))
        title = f"give the optimizer {setting.key}={text}"
        scene.tried(title, "the update is finite" if outcome.finite else "still not finite")
        effect = f"with {setting.key}={text}: the update is finite" if outcome.finite else "still not finite"
        remedy = Remedy(title, _diff(scene, setting, text), False, "proven" if outcome.finite else "failed", effect)
        if outcome.finite:
            break
    return remedy


def written(value: Any) -> str:
    """Write numbers as people do.

    >>> written(1e-08), written(1e-4), written((1e-30, 0.001)), written(0)
    ('1e-8', '1e-4', '(1e-30, 0.001)', '0')
    """
    if isinstance(value, list | tuple):
        return repr(value) if not value else f"{'(['[type(value) is list]}{', '.join(map(written, value))}{')]'[type(value) is list]}"
    if not isinstance(value, float) or not 0 < value < 1e-3:
        return repr(value)
    digits, _, exponent = f"{value:.15e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def rounds_to_zero(value: float, dtype: str) -> bool:
    """Whether a number other than 0 is 0 in a dtype."""
    return 0 < value < _SMALLEST.get(dtype, 0.0)


def _numbers(kind: type, key: str, value: Any) -> Iterator[Setting]:
    usual = _usual(kind, key)
    if (alone := number_of(value)) is not None:
        yield Setting(key, None, alone, value, usual)
    for place, member in enumerate(value if type(value) in (list, tuple) else ()):
        if (number := number_of(member)) is not None:
            yield Setting(key, place, number, value, usual)


def _usual(kind: type, key: str) -> Any:
    """Return what a class gives one of its arguments by itself; None where it does not say."""
    try:
        given = inspect.signature(kind).parameters.get(key)
    except (TypeError, ValueError):
        return None
    return None if given is None or given.default is inspect.Parameter.empty else given.default


def _holding(optimizer: Any, setting: Setting) -> list[dict[str, Any]]:
    """Return the groups that have this setting, or the attributes of the optimizer."""
    return [held for held in optimizer.param_groups if repr(held.get(setting.key)) == repr(setting.whole)] or [vars(optimizer)]


def _diff(scene: Scene, setting: Setting, text: str) -> str:
    """Return the change of the optimizer's construction as a diff; nothing where it does not take the number by that name."""
    from whynan.capsule.sites import resolve
    from whynan.causes.diffs import joined
    from whynan.causes.source import expression_at

    of_one_group = (
        scene.optimizer.param_groups and setting.key in scene.optimizer.defaults and repr(scene.optimizer.defaults[setting.key]) != repr(setting.whole)
    )
    expression = expression_at(scene.made_at, resolve(scene.made_at).file) if scene.made_at is not None and not of_one_group else None
    change = _given(expression, type(scene.optimizer), setting.key, text) if expression is not None else None
    return joined([(expression, change)]) if expression is not None and change is not None else ""


def _given(expression: Expression, kind: type, key: str, text: str) -> Change | None:
    """Return the place in a construction where an argument is given, or the construction with it, and the new text."""
    call = expression.node
    try:
        names = list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return None
    if not isinstance(call, ast.Call) or not _makes(expression, call.func, kind) or key not in names:
        return None
    if any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    by_name = next((k.value for k in call.keywords if k.arg == key), None)
    place = names.index(key)
    held = by_name or (call.args[place] if place < len(call.args) else None)
    return (held, text) if held is not None else (call, with_keyword(expression.text, key, text))


def _makes(expression: Expression, func: ast.expr, kind: type) -> bool:
    """Whether what is called is the class itself: a function that makes it has other arguments."""
    called = expression.value_of(func)
    return called is kind or (not isinstance(called, type) and last_name(func) == kind.__name__)
