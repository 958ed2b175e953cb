"""What the keeper writes into a checkpoint about it: the checksum, the name it was given, when, at which step.

`torch.save` writes a zip archive, and a zip archive may end with a comment. The mark is that comment, so file and
checksum are one file: there is no moment at which one is there and the other is not, and both travel together.
`torch.load` and every other reader of zip archives pass over it.

    local files … central directory … end record, its last field the length of the comment │ mark (JSON)
    ◄────────────────── sha256, with a length of 0 in that field ─────────────────────────►
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

_END = b"PK\x05\x06"
_END_SIZE = 22
_LONGEST = 0xFFFF
_CHUNK = 1 << 20
NO_COMMENT = b"\0\0"
_WORDS = (b'{"whynan": 1, ', b'"sha256": "', b'"inode": ')  # one that was damaged in a place or two still has some of them


@dataclass(frozen=True, slots=True)
class Mark:
    """The keeper's word on one checkpoint."""

    sha256: str
    size: int  # of what the checksum is over
    name: str
    time: int  # nanoseconds; never goes back within a series
    inode: int = 0  # tells the file that was written from a copy of it
    step: int | None = None
    finite: bool = True
    plain: bool = True  # readable without running code

    def to_bytes(self, **more: object) -> bytes:
        """Return the comment, sealed with a checksum of its own."""
        held = {"whynan": 1, **asdict(self), **more}
        return json.dumps({**held, "seal": _seal(held)}, allow_nan=False).encode()


def _seal(held: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(held, allow_nan=False).encode())


class HashingFile:
    """What `torch.save` writes to: passes on, adds up, and remembers the first failure of the disk."""

    def __init__(self, file: FileIO) -> None:
        self.file = file
        self.size = 0
        self.error: OSError | None = None
        self._sum = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of it; the archive writer hides the error of a write behind its own."""
        try:
            write_all(self.file, data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._sum.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Pass on."""
        self.file.flush()

    @property
    def sha256(self) -> str:
        """The checksum of what was written so far."""
        return self._sum.hexdigest()


def append(file: FileIO, mark: Mark) -> None:
    """Put the mark behind the archive that a file holds."""
    comment = mark.to_bytes()
    file.seek(-_END_SIZE, os.SEEK_END)
    end = file.read(_END_SIZE)
    if not end.startswith(_END) or not end.endswith(NO_COMMENT) or len(comment) > _LONGEST:
        raise ValueError("torch.save wrote something else than a zip archive without a comment")
    file.seek(-2, os.SEEK_END)
    write_all(file, struct.pack("<H", len(comment)) + comment)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write everything: one call may take a part only, as on a disk that is about to be full."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def read_mark(path: Path) -> Mark | None:
    """Return the mark of a checkpoint, or None where there is none.

    Cost: the last 64 KiB of the file are read.
    """
    tail = _tail(path)
    at = tail.rfind(_END)
    while at >= 0:
        comment = tail[at + _END_SIZE :]
        if tail[at + _END_SIZE - 2 : at + _END_SIZE] == struct.pack("<H", len(comment)):
            return parse(comment)
        at = tail.rfind(_END, 0, at)
    return None


def _tail(path: Path) -> bytes:
    """Return the part of a file that holds the mark, if there is one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(-min(size, _LONGEST + _END_SIZE), os.SEEK_END)
            return file.read()
    except OSError:
        return b""


def spoiled(path: Path) -> str:
    """Return what has become of the mark of a file that has none to be read, or an empty text where nothing says that it had one.

    Cost: the last 64 KiB of the file are read.
    """
    _, found, rest = _tail(path).rpartition(_END)
    rest, length = rest[_END_SIZE - len(_END) :], rest[_END_SIZE - len(_END) - 2 : _END_SIZE - len(_END)]
    if not found or len(length) < 2:
        return ""
    [missing] = (size - len(rest) for (size,) in [struct.unpack("<H", length)])
    if missing > 0:
        return f"truncated: {missing} bytes of its end are missing"
    if not any(word in rest for word in _WORDS):
        return ""
    return f"checksum differs: {-missing} bytes follow its end" if missing else "checksum differs: that of the checksum itself"


def parse(comment: bytes) -> Mark | None:
    """Read a comment or manifest; what is not ours is None.

    >>> parse(b"made by hand") is None
    True
    """
    try:
        held = json.loads(comment)
        seal = held.pop("seal", None)  # those of the first versions have none
        if held["whynan"] != 1 or (seal is not None and seal != _seal(held)):
            return None
        held.pop("whynan")
        held.pop("files", None)
        return Mark(**held)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def intact(path: Path, mark: Mark) -> str:
    """Return why a file is not what its mark says, or an empty text.

    Cost: the file is read once.
    """
    try:
        size = path.stat().st_size
        if size < mark.size:
            return f"truncated: {size} of {mark.size} bytes"
        return "" if _sum_of(path, mark.size) == mark.sha256 else "checksum differs"
    except OSError as error:
        return error.strerror or str(error)


def _sum_of(path: Path, size: int) -> str:
    total = hashlib.sha256()
    for chunk in _chunks(path, size - 2):
        total.update(chunk)
    total.update(NO_COMMENT)
    return total.hexdigest()


def sum_of_file(path: Path) -> str:
    """Return the checksum of a whole file."""
    total = hashlib.sha256()
    for chunk in _chunks(path, path.stat().st_size):
        total.update(chunk)
    return total.hexdigest()


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        read: Callable[[int], bytes] = file.read
        while size > 0:
            chunk = read(min(size, _CHUNK))
            if not chunk:
                return
            size -= len(chunk)
            yield chunk
