"""What is said about one setting."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from whynan.settings.layout import Layout, Setting
from whynan.settings.meaning import Meaning, meaning_of


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of one setting, or only a remark where there is nothing to change in the file."""

    about: str  # the meaning, in words
    reason: str
    measured: bool = False  # by a run, or only plain from the file
    setting: Setting | None = None
    value: float | None = None  # what it should be; None: nothing is changed
    key: str = ""  # of a setting that is to be added after `setting`


@dataclass(frozen=True, slots=True)
class Configured:
    """The settings of one file by what they mean, and what the code of the project reads."""

    layout: Layout
    read: frozenset[str] | None = None  # every name in the code; None where no code was looked at
    keys: frozenset[str] = frozenset()  # the names under which the code asks for settings

    def all(self, meaning: Meaning) -> list[Setting]:
        """Every setting of one meaning, in the order of the file."""
        return [s for s in self.layout.settings if meaning_of(s) is meaning]

    def first(self, meaning: Meaning) -> Setting | None:
        """The first of them that the code reads, as far as is known."""
        found = self.all(meaning)
        return next((s for s in found if self.in_effect(s)), found[0] if found else None)

    def number(self, meaning: Meaning) -> float | None:
        """Its value as a number."""
        found = self.first(meaning)
        return found.number if found is not None else None

    def in_effect(self, setting: Setting) -> bool:
        """Whether some code reads a name such as this one."""
        return self.read is None or setting.key in self.read

    @property
    def half(self) -> str:
        """`float16` or `bfloat16` where the file asks for one."""
        for setting in self.all(Meaning.DTYPE):
            said = f"{setting.key} {setting.word}".lower().replace("_", "")
            if setting.off or "32" in setting.word:
                continue
            if "bf16" in said or "bfloat16" in said:
                return "bfloat16"
            if "16" in said or "half" in said:
                return "float16"
        return ""

    @property
    def adam(self) -> bool:
        """Whether an Adam is named."""
        return any("adam" in s.word.lower() for s in self.all(Meaning.OPTIMIZER))


def nice_up(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten.

    >>> [nice_up(v) for v in (0.84, 1.2, 3.3, 180)]
    [1.0, 2.0, 5.0, 200.0]
    """
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{next(m for m in (1, 2, 5, 10) if value <= m * power * (1 + 1e-9)) * power:.6g}")


def nice_down(value: float) -> float:
    """Round down to 1, 2 or 5 times a power of ten.

    >>> [nice_down(v) for v in (0.0012, 0.9, 7e-5)]
    [0.001, 0.5, 5e-05]
    """
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return float(f"{next(m for m in (5, 2, 1) if value >= m * power * (1 - 1e-9)) * power:.6g}")


def quantile(values: Iterable[float], part: float) -> float:
    """Return the value that this part of the values does not exceed.

    >>> quantile(range(101), 0.99)
    99
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1 if part < 1 else len(ordered) - 1)]
