"""`whynan.check`: find out what a path holds, and look at it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from whynan.errors import UsageError
from whynan.forensics import data, logs
from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.checkpoints.comparing import compare
from whynan.forensics.checkpoints.examining import examine, examine_contents, joined
from whynan.forensics.checkpoints.history import tell_history
from whynan.forensics.checkpoints.members import Folder, Takes, holds_more, survey
from whynan.forensics.checkpoints.quarantine import quarantine_history
from whynan.forensics.findings import Checked, Comparison, History, Kind, Report
from whynan.forensics.kinds import kind_of, may_be_member, may_be_read
from whynan.forensics.nets import net
from whynan.forensics.wishes import Wishes

_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Deeds:
    """What is to be done beside looking."""

    against: str = ""  # compare with this one
    quarantine: str = ""  # move bad checkpoints there
    dry_run: bool = False  # say what would be moved


def check(what: object, /, *, against: str | os.PathLike[str] = "", quarantine: str | os.PathLike[str] = "", dry_run: bool = False, **wishes: object) -> Report:
    """Check files or a state dict and return a report: its repr is the text, `ok` and `findings` are for programs.

    `what` is a path, an address that fsspec knows, a list of them, or a state dict, module or optimizer. Keywords are the
    fields of `Wishes`: `expect={"lr": 1e-4}`, `ranges={"tokens": (0, 151643)}`, `allow=("*.mask",)`, `kind="checkpoint"`, `jobs=4`.

    >>> import torch
    >>> report = check({"fc.weight": torch.tensor([[1.0, float("nan")]])})
    >>> report.ok, [str(f) for f in report.findings]
    (False, ['bad: fc.weight: 1 nan of 2 values (WN601)'])

    Cost: every file is read once; memory does not grow with its size.
    """
    wanted = wishes_of(wishes)
    if isinstance(what, str | os.PathLike):
        return look([what], wanted, Deeds(os.fspath(against), os.fspath(quarantine), dry_run))
    if isinstance(what, list | tuple) and what and all(isinstance(p, str | os.PathLike) for p in what):
        return look(what, wanted, Deeds(os.fspath(against), os.fspath(quarantine), dry_run))
    return Report((_look_at_state(what, wanted),))


def wishes_of(given: Mapping[str, object]) -> Wishes:
    """Make wishes of keywords; a word that is none is misuse."""
    try:
        wishes = Wishes(**given)  # type: ignore[arg-type]
        return replace(wishes, kind=Kind(wishes.kind)) if wishes.kind is not None else wishes
    except (TypeError, ValueError) as error:
        raise UsageError(f"whynan.check: {error}") from None


def _look_at_state(state: object, wishes: Wishes) -> Checked:
    from whynan.forensics.checkpoints.memory import from_state

    contents = from_state(state)
    if not (contents.entries or contents.values or contents.notes or hasattr(state, "state_dict") or isinstance(state, Mapping)):
        raise UsageError(f"whynan.check: nothing to check in a {type(state).__name__}; give a path, a state dict, a module or an optimizer")
    return examine_contents("state", contents, wishes).checked


def look(paths: Iterable[str | os.PathLike[str]], wishes: Wishes = Wishes(), deeds: Deeds = Deeds()) -> Report:  # noqa: B008 - frozen
    """Check every path. What cannot be read is said; the others are checked all the same."""
    if deeds.quarantine and os.path.lexists(deeds.quarantine) and not os.path.isdir(deeds.quarantine):
        raise UsageError(f"--quarantine {deeds.quarantine}: not a folder")
    answers = _Answers()
    for place in {_identity(path): _find(os.fspath(path)) for path in paths}.values():
        _look_at(place, wishes, deeds, answers)
    answers.notes += _not_found(wishes, answers)
    if deeds.quarantine:
        _quarantine(deeds, answers)
    return Report(tuple(answers.checked), tuple(answers.histories), tuple(answers.comparisons), tuple(answers.notes), deeds.dry_run)


@dataclass(slots=True)
class _Answers:
    checked: list[Checked] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _identity(path: str | os.PathLike[str]) -> str:
    """What is named twice is looked at once."""
    return str(path) if "://" in str(path) else os.path.abspath(path)


def _find(path: str) -> Place | str:
    """Return the place a path names, or the path where it names an object in a module; all are found before any is read."""
    place = Place.of(path)
    try:
        there = place.exists()
    except Exception as error:  # whatever a driver raises: no network, no credentials
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UsageError(f"{path}: {said.splitlines()[0]}") from None
    if there:
        return place
    if _OBJECT.fullmatch(path):
        return path
    raise UsageError(f"{path}: no such file or folder")


def _look_at(place: Place | str, wishes: Wishes, deeds: Deeds, answers: _Answers) -> None:
    try:
        with net():
            if isinstance(place, str):
                answers.checked.append(data.check_object(place, wishes))
                return
            _look_into(place, wishes, deeds, answers)
            if deeds.against:
                answers.comparisons += _compare(place, deeds, wishes, answers.histories)
    except Unreadable as why:
        answers.checked.append(Checked(str(place), wishes.kind, unreadable=str(why)))


def _look_into(place: Place, wishes: Wishes, deeds: Deeds, answers: _Answers) -> None:
    kind = wishes.kind or kind_of(place)
    if place.is_dir() and (kind in (None, Kind.LOG) or (kind is Kind.CHECKPOINT and _is_folder_of_them(place))):
        _look_through(_survey(place, wishes, deeds), wishes, answers)
    elif kind is None:
        raise Unreadable("not a checkpoint, data set or log that whynan knows")
    else:
        _look_at_one(place, kind, wishes, answers)


def _is_folder_of_them(place: Place) -> bool:
    return kind_of(place) is not Kind.CHECKPOINT or holds_more(place, may_be_member)


def _survey(place: Place, wishes: Wishes, deeds: Deeds) -> Folder:
    takes: dict[Kind | None, Takes] = {None: may_be_member, Kind.CHECKPOINT: may_be_read, Kind.LOG: lambda place: False}
    return survey(place, _safely(takes.get(wishes.kind, may_be_member)), deeds.quarantine)


def _safely(takes: Takes) -> Takes:
    """What cannot even be asked what it is goes to the other files, where it is told."""

    def taken(place: Place) -> bool:
        try:
            with net():
                return takes(place)
        except Unreadable:
            return False

    return taken


def _look_through(root: Folder, wishes: Wishes, answers: _Answers) -> None:
    before = len(answers.checked) + len(answers.histories)
    passed: list[Place] = []
    for folder in root.walk():
        _look_at_members(folder, wishes, answers)
        passed += [other for other in folder.others if not _look_at_other(other, wishes, answers)]
    if passed:
        names = ", ".join(p.name for p in passed[:3]) + (", …" if len(passed) > 3 else "")
        answers.notes.append(f"{root.place}: passed over {len(passed)} other file{'s' * (len(passed) > 1)} ({names})")
    if len(answers.checked) + len(answers.histories) == before:
        raise Unreadable("; ".join(n for f in root.walk() for n in f.notes) or "no checkpoint, data set or log in it")


def _look_at_members(folder: Folder, wishes: Wishes, answers: _Answers) -> None:
    if len(folder.members) > 1:
        answers.histories.append(tell_history(folder, wishes))
        return
    answers.notes += folder.notes
    for member in folder.members:
        answers.checked.append(joined(str(member.place), [examine(p, wishes).checked for p in member.parts]))


def _look_at_other(place: Place, wishes: Wishes, answers: _Answers) -> bool:
    """Look at a file that is no checkpoint; False where it is none of ours."""
    try:
        with net():
            kind = kind_of(place)
    except Unreadable as why:
        answers.checked.append(Checked(str(place), unreadable=str(why)))
        return True
    if kind is None or wishes.kind not in (None, kind):
        return False
    _look_at_one(place, kind, wishes, answers)
    return True


def _look_at_one(place: Place, kind: Kind, wishes: Wishes, answers: _Answers) -> None:
    try:
        with net():
            answers.checked.append(_READERS[kind](place, wishes))
    except Unreadable as why:
        answers.checked.append(Checked(str(place), kind, unreadable=str(why)))


_READERS: dict[Kind, Callable[[Place, Wishes], Checked]] = {
    Kind.CHECKPOINT: lambda place, wishes: examine(place, wishes).checked,
    Kind.DATA: data.check_data,
    Kind.LOG: logs.check_log,
}


def _not_found(wishes: Wishes, answers: _Answers) -> list[str]:
    """Say which expectations could not be held against anything: in silence they would seem to be met."""
    everything = (*answers.checked, *(m for h in answers.histories for m in h.members))
    checkpoints = [c for c in everything if c.kind is Kind.CHECKPOINT and not c.unreadable]
    missing = [{f.place.rsplit(": ", 1)[-1] for f in c.findings if f.what == "expectation-not-found"} for c in checkpoints]
    return [f"--expect {name}: not stored in any checkpoint" for name in wishes.expect if missing and all(name in m for m in missing)]


def _quarantine(deeds: Deeds, answers: _Answers) -> None:
    """Move bad checkpoints aside: those of histories, and those that were named."""
    into = Path(deeds.quarantine)
    answers.histories = [quarantine_history(h, into, deeds.dry_run) for h in answers.histories]
    for checked in answers.checked:
        if checked.kind is Kind.CHECKPOINT and not checked.healthy:
            moved = quarantine_history(History(checked.path, (checked,)), into, deeds.dry_run)
            answers.notes += [*(f"{a} {'would be moved' if deeds.dry_run else 'moved'} to {b}" for a, b in moved.moved), *moved.notes]


def _compare(place: Place, deeds: Deeds, wishes: Wishes, known: Sequence[History]) -> list[Comparison]:
    """Compare two checkpoints; where one side is a folder of them, each with the one before it."""
    other = _find(deeds.against)
    if isinstance(other, str):
        raise UsageError(f"--against {other}: not a checkpoint")
    same = str(place) == str(other) if place.remote else os.path.realpath(str(place)) == os.path.realpath(str(other))
    chain = [*([] if same else _in_order(other, wishes, deeds, known)), *_in_order(place, wishes, deeds, known)]
    return [compare(newer, older, wishes) for older, newer in pairwise(chain)]


def _in_order(place: Place, wishes: Wishes, deeds: Deeds, known: Sequence[History]) -> Sequence[Place]:
    if not place.is_dir():
        return [place]
    told = next((h for h in known if h.folder == str(place)), None)
    if told is None and not _is_folder_of_them(place):
        return [place]
    told = told or tell_history(_survey(place, wishes, deeds), wishes)
    if not told.members:
        raise Unreadable("no checkpoint in it to compare with")
    return [Place.of(c.path) for c in told.members if not c.unreadable]
