"""Checkpoints that belong together, newest first, and what may be removed of them.

A series is what lies in one directory under names that differ only in their last number: `step-100.pt`, `step-200.pt`.
A name without a number is a series too: what it held before is kept as `last.previous-1.pt`, `last.previous-2.pt`, …
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from whynan.recovery import atomic
from whynan.recovery.marks import Mark, parse, read_mark, spoiled

MANIFEST = ".whynan.json"
_SUFFIXES = (".pt", ".pth", ".ckpt", ".tar")
_PREVIOUS = re.compile(r"\.previous-(\d+)$")
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint on disk: a file of `torch.save`, or a directory of `torch.distributed.checkpoint`."""

    path: Path
    mark: Mark | None
    spoiled: str = ""  # what has become of its mark

    @property
    def time(self) -> int:
        """When it was saved, by its mark, else by the file system."""
        if self.mark is not None:
            return self.mark.time
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime_ns
        return 0

    @property
    def whole(self) -> bool:
        """Whether it is good by its mark, and not shorter than that says; its checksum is not computed."""
        if self.mark is None or not self.mark.finite:
            return False
        with contextlib.suppress(OSError):
            return is_sharded(self.path) or self.path.stat().st_size >= self.mark.size
        return False


def is_sharded(path: Path) -> bool:
    """Whether a path is a directory that `torch.distributed.checkpoint` wrote."""
    return os.path.isfile(path / ".metadata")


def series_of(path: Path) -> str:
    """Return what the names of a series have in common.

    >>> [series_of(Path(n)) for n in ("step-100.pt", "fold2-step-7.pt", "last.pt", "last.previous-3.pt")]
    ['step-#.pt', 'fold2-step-#.pt', 'last.pt', 'last.pt']
    """
    stem, suffix = _split(path)
    return _LAST_NUMBER.sub("#", _PREVIOUS.sub("", stem)) + suffix


def _split(path: Path) -> tuple[str, str]:
    """Split a name before its suffix, if that is one: `epoch-1.5` has none."""
    return (path.stem, path.suffix) if re.fullmatch(r"\.[a-zA-Z]\w*", path.suffix) else (path.name, "")


def describe_path(path: Path) -> Candidate | None:
    """Return what lies at a path if it may be a checkpoint."""
    if atomic.is_temporary(path):
        return None
    if is_sharded(path):
        with contextlib.suppress(OSError):
            held = parse((path / MANIFEST).read_bytes())
            return Candidate(path, held, "" if held is not None else f"checksum differs: that of {MANIFEST}")
        return Candidate(path, None)
    if not os.path.isfile(path):  # `Path.is_file` raises for a name that is too long
        return None
    mark = read_mark(path)
    lost = spoiled(path) if mark is None else ""
    return Candidate(path, mark, lost) if mark is not None or lost or _may_be_checkpoint(path) else None


def _may_be_checkpoint(path: Path) -> bool:
    """A file by its suffix, or an archive of `torch.save`; other archives are not ours to judge."""
    try:
        with path.open("rb") as file:
            archive = file.read(4) == b"PK\x03\x04"
        if not archive:
            return path.suffix in _SUFFIXES
        with zipfile.ZipFile(path) as opened:
            return any(name.endswith("/data.pkl") for name in opened.namelist())
    except zipfile.BadZipFile:
        return True  # cut off or overwritten: to be told, not to be passed over in silence
    except OSError:
        return False


def candidates(paths: Iterable[Path]) -> list[Candidate]:
    """Return the checkpoints among some paths, newest first; those that belong to no kept series come last.

    One without a mark under the name of a kept series may be one that lost it, cut off or overwritten.
    """
    found = [c for p in paths if (c := describe_path(p)) is not None]
    kept = {series_of(c.path) for c in found if c.mark is not None}
    return sorted(found, key=lambda c: (series_of(c.path) in kept, c.time), reverse=True)


def members(path: Path) -> list[Candidate]:
    """Return the marked checkpoints of the series that a path belongs to, newest first.

    Cost: the end of each file of the series is read.
    """
    wanted = series_of(path)
    with contextlib.suppress(OSError):
        named = [p for p in path.parent.iterdir() if series_of(p) == wanted]
        return [c for c in candidates(named) if c.mark is not None and series_of(Path(c.mark.name)) == wanted]
    return []


def next_time(series: list[Candidate]) -> int:
    """Return the time now, or one after the newest of a series where the clock went back."""
    return max([time.time_ns(), *(c.mark.time + 1 for c in series if c.mark is not None)])


def keep_previous(path: Path) -> None:
    """Give what stands at a path a second name, so that replacing it loses nothing.

    A file gets a hard link: at no moment is there no checkpoint. A directory is moved: after a crash right then it is
    the newest of the series under its new name.
    """
    aside = _free_name(path)
    if path.is_dir():
        path.rename(aside)
    else:
        with contextlib.suppress(OSError):  # no hard links on this file system: one generation only
            os.link(path, aside)


def _free_name(path: Path) -> Path:
    stem, suffix = _split(path)
    taken = [int(m[1]) for p in path.parent.iterdir() if series_of(p) == series_of(path) and (m := _PREVIOUS.search(_split(p)[0]))]
    return path.with_name(f"{stem}.previous-{max(taken, default=0) + 1}{suffix}")


def surplus(newest: Candidate, keep: int, written: frozenset[Path]) -> list[Candidate]:
    """Return what may go: older than the newest `keep` good ones of the series, and written by a keeper under that name.

    A copy that somebody made carries the mark too; it has another name or another inode, and stays. A second name that `keep_previous` gave
    to a file, killed before it was replaced, goes.
    """
    assert newest.mark is not None
    alike = [c for c in members(newest.path) if c.whole and c.mark is not None and c.mark.plain == newest.mark.plain]
    own = [c for c in alike if _own(c, written)]
    kept = _distinct(own)[:keep]
    return [c for c in own if c not in kept and c.path != newest.path]


def _distinct(found: list[Candidate]) -> list[Candidate]:
    """Two names of one file count once."""
    seen: dict[object, Candidate] = {}
    for candidate in found:
        seen.setdefault((candidate.mark.time, candidate.mark.sha256) if candidate.mark else candidate.path, candidate)
    return list(seen.values())


def _own(candidate: Candidate, written: frozenset[Path]) -> bool:
    mark = candidate.mark
    if mark is None:
        return False
    named = candidate.path.name == mark.name or _PREVIOUS.search(_split(candidate.path)[0]) is not None
    with contextlib.suppress(OSError):
        return candidate.path in written or (named and candidate.path.lstat().st_ino == mark.inode)
    return False
