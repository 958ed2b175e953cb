"""`whynan.check`: find out what a path holds, and look at it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from whynan.errors import UsageError
from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.findings import Checked, History, Report
from whynan.forensics.wishes import Wishes


def look(paths: Iterable[str | os.PathLike[str]], wishes: Wishes = Wishes()) -> Report:  # noqa: B008 - frozen
    """Check every path. What cannot be read is said; the others are checked all the same."""
    checked: list[Checked] = []
    histories: list[History] = []
    for path in paths:
        place = Place.of(path)
        if not place.exists():
            raise UsageError(f"{path}: no such file or folder")
        for answer in _look_at(place, wishes):
            (histories if isinstance(answer, History) else checked).append(answer)  # type: ignore[arg-type]
    return Report(tuple(checked), tuple(histories))


def _look_at(place: Place, wishes: Wishes) -> Iterable[Checked | History]:
    try:
        yield from _by_kind(place, wishes)
    except Unreadable as why:
        yield Checked(str(place), wishes.kind, unreadable=str(why))


def _by_kind(place: Place, wishes: Wishes) -> Iterable[Checked | History]:
    raise Unreadable("not a checkpoint, data set or log that whynan knows")
