"""Move bad checkpoints aside. Nothing is deleted, nothing is overwritten; what was moved is said.

same file system:   the name moves, in one piece
another one:        copy ─► fsync ─► compare byte for byte ─► give it its name ─► fsync ─► take the source away
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import secrets
import shutil
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path

from whynan.errors import UsageError
from whynan.forensics.findings import Checked, History

_TALKS = (".json", "", ".txt", ".yaml", ".yml")  # files that may name a checkpoint: indices, `latest`, `checkpoint`
_LONGEST = 1 << 22


def quarantine_history(history: History, folder: Path, dry_run: bool) -> History:
    """Move the bad members of a history into a folder; returns the history with what was moved, or would be.

    One member of several files moves with all of them. What still names a moved one is said.
    """
    moved: list[tuple[str, str]] = []
    notes: list[str] = []
    try:
        for checked in history.members:
            if not checked.healthy:
                _move_or_say(checked, history, folder, dry_run, moved, notes)
    except KeyboardInterrupt as stop:
        for source, target in () if dry_run else moved:
            stop.add_note(f"{source} was moved to {target}")
        raise
    return replace(history, moved=(*history.moved, *moved), notes=(*history.notes, *notes))


def _move_or_say(checked: Checked, history: History, folder: Path, dry_run: bool, moved: list[tuple[str, str]], notes: list[str]) -> None:
    if any(m.path.startswith(checked.path.rstrip("/") + "/") for m in history.members):
        notes.append(f"{checked.path} was not moved: other checkpoints lie in it")
    else:
        _move_one(checked, folder, dry_run, moved, notes)


def _move_one(checked: Checked, folder: Path, dry_run: bool, moved: list[tuple[str, str]], notes: list[str]) -> None:
    parts = checked.facts.get("files")
    if "://" in checked.path:
        notes.append(f"{checked.path} was not moved: only local files are moved")
        return
    sources = [Path(str(p)) for p in parts] if isinstance(parts, list) and not os.path.isdir(checked.path) else [Path(checked.path)]
    for source in sources:
        try:
            refuse(source, folder)
            notes += _mentions(source, dry_run)
            moved.append((str(source), str(target_of(source, folder, {t for _, t in moved}) if dry_run else move(source, folder))))
        except (OSError, UsageError) as error:
            notes.append(f"{source.name} was not moved: {getattr(error, 'strerror', None) or error}")


def refuse(source: Path, folder: Path) -> None:
    """Raise where a folder would be moved into itself, or a file to where it is."""
    real, into = source.resolve(), folder.resolve()
    if into == source.parent.resolve():
        raise UsageError("it lies there already")
    if not source.is_symlink() and (into == real or into.is_relative_to(real)):
        raise UsageError(f"{folder} lies inside it")


def _mentions(source: Path, dry_run: bool) -> Iterator[str]:
    """Say which files and links beside a checkpoint still name it."""
    with contextlib.suppress(OSError):
        for beside in sorted(source.parent.iterdir()):
            if beside == source:
                continue
            if beside.is_symlink():
                if beside.resolve() == source.resolve() and not source.is_symlink():
                    yield f"{beside.name} is a link to {source.name}, which {'would no longer be' if dry_run else 'is no longer'} there"
            elif beside.suffix in _TALKS and beside.is_file() and beside.stat().st_size <= _LONGEST and _names(beside, source.name):
                yield f"{beside.name} still names {source.name}"


def _names(file: Path, name: str) -> bool:
    data, wanted = file.read_bytes(), name.encode()
    at = data.find(wanted)
    while at >= 0:
        ends = data[at - 1 : at] + data[at + len(wanted) : at + len(wanted) + 1]
        if not any(chr(c).isalnum() for c in ends):
            return True
        at = data.find(wanted, at + 1)
    return False


def target_of(source: Path, folder: Path, taken: Container[str] = ()) -> Path:
    """Return a free name in a folder: the own one, else with a number before the suffix."""
    number, target = 1, folder / source.name
    while os.path.lexists(target) or str(target) in taken:
        number += 1
        target = folder / f"{source.stem}.{number}{source.suffix}"
    return target


def move(source: Path, folder: Path) -> Path:
    """Move a file, a folder or a link into a folder under a free name, and return where it is now."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        target = target_of(source, folder)
        try:
            _move_to(source, target)
        except FileExistsError:
            continue  # somebody took the name between the look and the move
        _sync(folder)
        _sync(source.parent)
        return target


def _move_to(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(_absolute(source))
        source.unlink()
        return
    try:
        _rename(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
            raise
        _carry(source, target)


def _absolute(link: Path) -> Path:
    """Where a link leads, said so that it still leads there from another folder."""
    return Path(os.path.normpath(link.parent.absolute() / os.readlink(link)))


def _rename(source: Path, target: Path) -> None:
    """Give another name without ever replacing one: `rename` alone would."""
    if source.is_dir():
        target.mkdir()
        try:
            source.rename(target)
        except OSError:
            with contextlib.suppress(OSError):
                target.rmdir()
            raise
        return
    os.link(source, target, follow_symlinks=False)
    source.unlink()


def _carry(source: Path, target: Path) -> None:
    """Copy to another file system, compare, and only then take the source away."""
    stand_in = target.with_name(f".{target.name}.whynan-{secrets.token_hex(4)}")
    before = _stamps(source)
    try:
        if source.is_dir():
            shutil.copytree(source, stand_in, symlinks=True)
        else:
            shutil.copy2(source, stand_in)
        _sync_all(stand_in)
        if _stamps(source) != before:
            raise UsageError("it changed while it was copied")
        _compare(source, stand_in)
        _take_name(stand_in, target)
    except BaseException:
        _remove(stand_in)
        raise
    _sync(target.parent)
    _remove(source)


def _take_name(stand_in: Path, target: Path) -> None:
    """The stand-in lies beside its target: a plain move, but on a file system without hard links the name is reserved first."""
    try:
        _rename(stand_in, target)
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(stand_in, target)


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if not p.is_dir() or p.is_symlink()) if path.is_dir() and not path.is_symlink() else [path]


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    return [(str(p), s.st_size, s.st_mtime_ns) for p in _files(path) for s in [p.lstat()]]


def _compare(source: Path, copy: Path) -> None:
    for file in _files(source):
        twin = copy / file.relative_to(source) if source.is_dir() else copy
        same = os.readlink(file) == os.readlink(twin) if file.is_symlink() else filecmp.cmp(file, twin, shallow=False)
        if not same:
            raise UsageError(f"the copy of {file.name} is not the same as the file")


def _sync_all(path: Path) -> None:
    for file in _files(path):
        if not file.is_symlink():
            _sync(file)
    _sync(path)


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
