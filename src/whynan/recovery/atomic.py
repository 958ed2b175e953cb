"""Write a file or a directory in one piece: it stands complete under its name, or nothing has changed.

    open a temporary beside the target, locked ──► write ──► fsync ──► rename ──► fsync of the directory

The lock says that the writer is alive: it is released by the kernel when a process ends, however it ends, also in
another container or, on shared file systems that carry locks, on another machine. So what a killed save left behind
is recognised by its name and by a lock that can be had.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

_MARK = ".whynan-tmp-"


def temporary_beside(path: Path) -> Path:
    """Return a fresh hidden name beside a path, recognisable as ours."""
    return path.with_name(f".{path.name}{_MARK}{secrets.token_hex(6)}")


def is_temporary(path: Path) -> bool:
    """Whether a name is one that `temporary_beside` gives."""
    head, mark, token = path.name.rpartition(_MARK)
    return bool(mark) and head.startswith(".") and len(token) == 12


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[tuple[FileIO, Path]]:
    """Give a temporary file and its path; at the end of the block it takes the place of `path`.

    If the block raises, the temporary is removed and `path` is as it was.

    Cost: one fsync of the file and one of the directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    clean_leftovers(path.parent)
    temporary, file = _open_locked(path)
    try:
        with file:
            yield file, temporary
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _open_locked(path: Path) -> tuple[Path, FileIO]:
    while True:
        temporary = temporary_beside(path)
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(handle, wait=True)
        if os.fstat(handle).st_nlink:
            return temporary, os.fdopen(handle, "w+b", buffering=0)  # a buffer would copy every tensor
        os.close(handle)  # somebody cleaned up between the two calls and took it for a leftover


def lock_directory(path: Path) -> int:
    """Hold the lock of a temporary directory until the returned handle is closed."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _lock(handle, wait=True)
    return handle


def _lock(handle: int, wait: bool = False) -> bool:
    """Take the lock, waiting for it or not; a file system without locks answers no."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def clean_leftovers(directory: Path) -> list[Path]:
    """Remove what killed saves left in a directory; what a living process writes is left alone.

    Cost: one listing of the directory.
    """
    with contextlib.suppress(OSError):
        return [p for p in directory.iterdir() if is_temporary(p) and _remove_if_dead(p)]
    return []


def _remove_if_dead(path: Path) -> bool:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _lock(handle):
                remove(path)
                return True
        finally:
            os.close(handle)
    return False


def remove(path: Path) -> None:
    """Remove a file, or a directory with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Have a file's contents on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk, where the file system can do that."""
    with contextlib.suppress(OSError):
        sync_file(path)
