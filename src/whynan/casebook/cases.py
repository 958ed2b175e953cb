"""The cases as they lie on disk: a program in a few files, and `case.toml`, which says what it shows."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whynan.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent
_PLACES = (_PACKAGE / "programs", _PACKAGE.parent.parent.parent / "examples" / "casebook")  # in a wheel; in a clone


@dataclass(frozen=True, slots=True)
class Case:
    """One failing program and what is expected of it."""

    name: str
    title: str
    story: str
    folder: Path
    before: tuple[str, ...]  # what python runs first, where a run is resumed
    failing: tuple[str, ...]
    healed: tuple[str, ...]
    code: str
    file: str
    text: str  # the line where it is born, by its text
    what: str  # the quality that is measured
    at_most: float | None
    at_least: float | None
    seconds: float

    def good(self, quality: float) -> bool:
        """Whether a quality is the one that a healed program reaches."""
        return (self.at_most is None or quality <= self.at_most) and (self.at_least is None or quality >= self.at_least)


def all_cases() -> list[Case]:
    """Return the cases in the order of the casebook."""
    order = ("transcoder", "token_image", "joint_diffusion", "clustering_heads", "hyper_connections")
    book = next((place for place in _PLACES if place.is_dir()), None)
    if book is None:
        raise UsageError("the programs of the casebook are not installed here")
    return [_read(book / name) for name in order]


def chosen(names: tuple[str, ...]) -> list[Case]:
    """Return the cases of these names, or all."""
    cases = {case.name: case for case in all_cases()}
    for name in names:
        if name not in cases:
            raise UsageError(f"unknown case {name!r}; choose from {', '.join(cases)}")
    return [cases[name] for name in names] or list(cases.values())


def _read(folder: Path) -> Case:
    said: dict[str, Any] = tomllib.loads((folder / "case.toml").read_text(encoding="utf-8"))
    expected, quality = said["expected"], said["quality"]
    return Case(
        said["name"],
        said["title"],
        said["story"],
        folder,
        tuple(said.get("before", ())),
        tuple(said["failing"]),
        tuple(said["healed"]),
        expected["code"],
        expected["file"],
        expected["text"],
        quality["what"],
        quality.get("at_most"),
        quality.get("at_least"),
        float(said["seconds"]["failing"] + said["seconds"]["healed"]),
    )
