"""Which things in a folder are checkpoints, and which files make up one checkpoint.

folder ─► file, or folder that is one checkpoint ─► member
       ─► shard, file of the optimizer, scheduler, scaler ─► part of the member it was saved with
       ─► link to a member ─► said, not counted
       ─► folder of checkpoints ─► a folder of its own
       ─► anything else ─► for the other readers
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from whynan.forensics.addresses import Place, Unreadable, is_text
from whynan.forensics.checkpoints.steps import series_of, step_in_name

_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")  # nothing else is called so: one that cannot be read is told, not passed over
_COMPANION = re.compile(
    r"(^|[-_.])(optim(izer)?s?|optim_states?|opt|sched(uler)?s?|lr_scheduler|scaler|rng(_states?)?|random_states?|training_args|trainer_state)(?=[-_.\d]|$)",
    re.IGNORECASE,
)
_STEP_FOLDER = re.compile(r"^\d+$|(step|checkpoint|ckpt|epoch|iter|global|save)[a-z]*[-_=.]?\d+", re.IGNORECASE)
_SHARD = re.compile(r"(.*?)[-_.]?\d+-of-(\d+)(.*)")
_DEEPEST = 12
LFS = b"version https://git-lfs"  # how a file begins that Git was told to fetch later

Takes = Callable[[Place], bool]


@dataclass(frozen=True, slots=True)
class Member:
    """One checkpoint: a file, a folder, or the files that were saved together."""

    place: Place
    parts: tuple[Place, ...]

    @property
    def beside(self) -> bool:
        """Whether it holds only what is kept beside weights: an optimizer, a scheduler, a scaler."""
        return all(_COMPANION.search(p.name) for p in self.parts)

    @property
    def modified(self) -> float:
        """When it was last written, where that is known."""
        try:
            return 0.0 if self.place.remote else os.stat(self.place.address).st_mtime
        except OSError:
            return 0.0


@dataclass(slots=True)
class Folder:
    """What lies in one folder."""

    place: Place
    members: list[Member] = field(default_factory=list)
    others: list[Place] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def walk(self) -> Iterator[Folder]:
        """Yield this folder and those in it."""
        yield self
        for folder in self.folders:
            yield from folder.walk()


def survey(place: Place, takes: Takes, without: str = "") -> Folder:
    """Sort what lies in a folder, and in the folders in it; `takes` says whether a path is a checkpoint.

    A folder named `without` is left out: what was moved aside is not looked at again.
    """
    return _Survey(takes, os.path.realpath(without) if without else "").folder(place, 0, frozenset())


class _Survey:
    def __init__(self, takes: Takes, without: str) -> None:
        self._takes = takes
        self._without = without
        self._seen: set[str] = set()

    def folder(self, place: Place, depth: int, above: frozenset[str]) -> Folder:
        found = Folder(place)
        real = _real(place)
        refused = self._refused(real, depth, above)
        if refused:
            found.notes.append(f"{place}: not followed: {refused}")
            return found
        self._seen.add(real)
        try:
            children = list(place.children())
        except Unreadable as why:
            found.notes.append(f"{place}: {why}")
            return found
        inside = {_real(c) for c in children if not _is_link(c)}
        for child in children:
            try:
                self._child(found, child, inside, depth, above | {real})
            except Unreadable as why:
                found.notes.append(f"{child.name}: {why}")
        _join_shards(found)
        _join_companions(found)
        return found

    def _refused(self, real: str, depth: int, above: frozenset[str]) -> str:
        if any(a == real or a.startswith(f"{real.rstrip('/')}/") for a in above):
            return "a link to a folder above it"
        return "a link to a folder that was looked at" if real in self._seen else "too deep" if depth > _DEEPEST else ""

    def _child(self, found: Folder, child: Place, inside: set[str], depth: int, above: frozenset[str]) -> None:
        if child.name.startswith(".") or (self._without and _real(child) == self._without):
            return
        if _is_link(child) and not os.path.exists(child.address):
            found.notes.append(f"{child.name} is a link to {os.readlink(child.address)}, which is not there")
        elif _is_link(child) and _real(child) in inside:
            found.notes.append(f"{child.name} is a link to {os.path.basename(_real(child))}")
        elif child.is_dir():
            self._subfolder(found, child, depth, above)
        elif self._takes(child):
            found.members.append(Member(child, (child,)))
        else:
            found.others.append(child)

    def _subfolder(self, found: Folder, child: Place, depth: int, above: frozenset[str]) -> None:
        if self._takes(child) and not holds_more(child, self._takes):
            found.members.append(Member(child, (child,)))
            return
        below = self.folder(child, depth + 1, above)
        if _STEP_FOLDER.search(child.name) and below.members and not below.folders and not _is_series(below.members):
            found.members.append(Member(child, tuple(p for m in below.members for p in m.parts)))
            found.others += below.others
            found.notes += below.notes
        elif below.members or below.others or below.folders or below.notes:
            found.folders.append(below)


def holds_more(place: Place, takes: Takes) -> bool:
    """Whether checkpoints lie in a folder that is one itself, as beside the last one that DeepSpeed names in `latest`."""
    try:
        return any(_STEP_FOLDER.search(c.name) and c.is_dir() and takes(c) for c in place.children())
    except Unreadable:
        return False


def is_candidate(place: Place) -> bool:
    """Whether a file's name says that it should be a checkpoint, and it is not plain text: `train.pt` may be Portuguese."""
    return place.suffix in _SUFFIXES and not _is_text(place)


def _is_text(place: Place) -> bool:
    try:
        with place.open() as file:
            head = file.read(512)
    except (Unreadable, OSError):
        return False
    return bool(head) and not head.startswith(LFS) and is_text(head)


def _is_series(members: list[Member]) -> bool:
    kinds = [series_of(m.place.name) for m in members]
    return any(kinds.count(kind) > 1 for kind in kinds)


def _join_shards(folder: Folder) -> None:
    """Files named `…-00001-of-00003` are one checkpoint, also where no index names them."""
    groups: dict[str, list[Member]] = {}
    for member in folder.members:
        found = _SHARD.fullmatch(member.place.name)
        groups.setdefault(f"{found[1]}-of-{found[2]}{found[3]}" if found else member.place.name, []).append(member)
    folder.members[:] = [Member(g[0].place, tuple(p for m in g for p in m.parts)) for g in groups.values()]


def _join_companions(folder: Folder) -> None:
    """Give the files of an optimizer, a scheduler or a scaler to the checkpoint they were saved with."""
    alone = [m for m in folder.members if not m.place.is_dir() and _COMPANION.search(m.place.name)]
    main = [m for m in folder.members if m not in alone]
    for companion in alone:
        number = step_in_name(companion.place.name)
        fits = [m for m in main if step_in_name(m.place.name) == number and not m.place.is_dir()]
        if number is None and len(fits) < len(main):
            fits = []  # beside a series it may belong to any of it
        if len(fits) == 1:
            main[main.index(fits[0])] = Member(fits[0].place, (*fits[0].parts, *companion.parts))
        elif companion.place.name != "training_args.bin":
            main.append(companion)
    folder.members[:] = main


def _is_link(place: Place) -> bool:
    return not place.remote and os.path.islink(place.address)


def _real(place: Place) -> str:
    return place.address.rstrip("/") if place.remote else os.path.realpath(place.address)
