"""Files wherever they are: a local path, or an address that fsspec knows (`s3://bucket/key`), read without loading them.

Local files are read with the standard library alone. For addresses fsspec and the user's driver are asked for.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from whynan.errors import UsageError

_LONGEST_JSON = 64 << 20
_MOST_OBJECTS = 1_000_000


class Unreadable(Exception):
    """Why a file cannot be read, in one line without its path."""

    damaged = True


class NotLookedAt(Unreadable):
    """Why a file was not read that may be whole: a limit of ours, a permission, a failing disk, a file still being written."""

    damaged = False


@dataclass(frozen=True, slots=True)
class Place:
    """One file or folder.

    >>> Place.of("runs/a/last.CKPT").name, Place.of("runs/a/last.CKPT").suffix
    ('last.CKPT', '.ckpt')
    """

    address: str
    system: Any = None  # an fsspec file system, for what is not local

    @classmethod
    def of(cls, address: str | os.PathLike[str]) -> Place:
        """Return the place an address names; nothing is opened."""
        text = os.fspath(address)
        if "://" not in text:
            return cls(text)
        try:
            import fsspec
        except ImportError:
            raise UsageError(f"{text}: addresses need fsspec; pip install fsspec and the driver for {text.split(':')[0]}") from None
        try:
            system, _ = fsspec.core.url_to_fs(text)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{text}: {one_line(error)}") from None
        return cls(text, system)

    @property
    def remote(self) -> bool:
        return self.system is not None

    @property
    def name(self) -> str:
        return self.address.rstrip("/").rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """The last ending, lower case."""
        return Path(self.name).suffix.lower()

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.address.rstrip('/')}/{name}", self.system)

    def inside(self, name: object) -> Place:
        """Return what a file of this folder names; raises `Unreadable` where that lies outside it."""
        if not isinstance(name, str) or {"\\", "\0"} & set(name) or any(part in ("", ".", "..") for part in name.split("/")):
            raise Unreadable(f"names a file outside the folder: {str(name)[:100]}")
        return self / name

    def is_dir(self) -> bool:
        """Whether it is a folder; raises `Unreadable` where a remote system does not answer."""
        try:
            return bool(self.system.isdir(self.address)) if self.remote else os.path.isdir(self.address)
        except Exception as error:
            raise _failed(error) from None

    def exists(self) -> bool:
        """Whether it is there; raises what the system says where that cannot be known."""
        if self.remote:
            return bool(self.system.exists(self.address))
        try:
            os.lstat(self.address)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self) -> int:
        """The length of a file in bytes."""
        try:
            return int(self.system.size(self.address)) if self.remote else os.stat(self.address).st_size
        except Exception as error:
            raise _failed(error) from None

    def open(self) -> IO[bytes]:
        """Open a regular file for reading; raises `Unreadable`. Devices and pipes are refused: they never end."""
        try:
            if self.remote:
                opened: IO[bytes] = self.system.open(self.address, "rb")
                return opened
            if not stat.S_ISREG(os.stat(self.address).st_mode):
                raise NotLookedAt("not a regular file")
            return io.open(self.address, "rb")  # noqa: UP020 - `open` is this method
        except Unreadable:
            raise
        except Exception as error:
            raise _failed(error) from None

    def children(self) -> Iterator[Place]:
        """Yield what lies in a folder, sorted by name; symbolic links to folders are yielded and not followed further."""
        try:
            names = [e.rstrip("/").rsplit("/", 1)[-1] for e in self.system.ls(self.address, detail=False)] if self.remote else os.listdir(self.address)
        except Exception as error:
            raise _failed(error) from None
        for name in sorted(names):
            yield self / name


def _failed(error: Exception) -> Unreadable:
    """What is not there is damage to what names it; any other failure says nothing of the file."""
    return (Unreadable if isinstance(error, FileNotFoundError) else NotLookedAt)(one_line(error))


def one_line(error: BaseException) -> str:
    r"""Return the first line of what an error says, or its kind where it says nothing.

    >>> one_line(ValueError("bad\nand more")), one_line(EOFError()), one_line(FileNotFoundError(2, "No such file"))
    ('bad', 'EOFError', 'no such file')
    """
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:160].lower() if isinstance(error, OSError) else text.splitlines()[0][:160]


def is_text(head: bytes) -> bool:
    """Whether the beginning of a file is that of a text: no control characters in it."""
    return not any(byte < 32 and byte not in b"\t\n\f\r" for byte in head)


def fill(file: IO[bytes], piece: memoryview) -> None:
    """Read until a buffer is full; raises `Unreadable` where the file ends before."""
    done = 0
    while done < len(piece):
        try:
            got = file.readinto(piece[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise NotLookedAt(one_line(error)) from None
        except Exception as error:  # what an archive raises where it is damaged
            raise Unreadable(f"cannot be read to its end: {one_line(error)}") from None
        if not got:
            raise NotLookedAt("truncated: it ended early; it may still be being written")
        done += got


def read_json(place: Place) -> dict[str, object]:
    """Return the object a small JSON file holds; raises `Unreadable`."""
    size = place.size()
    if size > _LONGEST_JSON:
        raise NotLookedAt(f"{place.name}: a JSON file of {size} bytes is larger than is looked at")
    with place.open() as file:
        data = file.read(size)
    if data.count(b"{") + data.count(b"[") > _MOST_OBJECTS:
        raise NotLookedAt(f"{place.name}: a JSON file with too many objects to be looked at")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Unreadable(f"{place.name}: not valid JSON") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{place.name}: not a JSON object")
    return found
