"""Checkpoints made to harm whoever reads them; none of these must do anything here."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path


class Runs:
    """Unpickled by `pickle`, this would run a shell command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def torch_zip(path: Path, data: bytes, storages: dict[str, bytes] | None = None, compress: bool = False, prefix: str = "archive") -> Path:
    """Write an archive as torch does, around a pickle of ours."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{prefix}/data.pkl", data)
        archive.writestr(f"{prefix}/byteorder", b"little")
        for key, content in (storages or {}).items():
            archive.writestr(f"{prefix}/data/{key}", content)
        archive.writestr(f"{prefix}/version", b"3\n")
    return path


def storage(key: str = "0", kind: str = "FloatStorage", count: int = 4) -> bytes:
    """The opcodes that refer to a storage."""
    return b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + integer(count) + b"tQ"


def tensor(stored: bytes, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """The opcodes that make a tensor."""
    shape, steps = (b"(" + b"".join(integer(n) for n in numbers) + b"t" for numbers in (sizes, strides))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + integer(offset) + shape + steps + b"\x89}tR"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def named(**values: bytes) -> bytes:
    """A pickle of a dictionary whose values are opcodes."""
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."


def laughs(depth: int) -> bytes:
    """A tuple of two, each a tuple of two, …: 2 to the depth leaves out of a few bytes; and as a key, which must not be hashed."""
    made = b"\x80\x02}(K\x01"
    for i in range(depth):
        made += b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86"
    return made + b"q\xf0K\x01" + text("again") + b"h\xf0u."


def cycle() -> bytes:
    """A list in itself, and a dictionary in itself."""
    return b"\x80\x02}q\x00(" + text("list") + b"]q\x01h\x01a" + text("self") + b"h\x00u."


def deep(depth: int) -> bytes:
    """Lists in lists."""
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def safetensors(path: Path, header: object, data: bytes = b"", declared: int | None = None) -> Path:
    """Write a safetensors file with any header."""
    packed = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed) if declared is None else declared) + packed + data)
    return path


def bomb(path: Path, size: int) -> Path:
    """A storage of zeros, packed a thousand to one."""
    return torch_zip(path, named(w=tensor(storage(count=size // 4), (size // 4,), (1,))), {"0": bytes(size)}, compress=True)


def lie_about_size(path: Path, claimed: int) -> Path:
    """An archive whose table says that an entry unpacks to far more than it can."""
    torch_zip(path, named(w=tensor(storage(count=claimed // 4), (claimed // 4,), (1,))), {"0": bytes(1000)}, compress=True)
    data = bytearray(path.read_bytes())
    at = data.rfind(b"archive/data/0") - 46
    data[at + 24 : at + 28] = struct.pack("<I", claimed)
    path.write_bytes(data)
    return path


def overlapping(path: Path) -> Path:
    """Two entries of an archive over the same bytes."""
    torch_zip(path, named(a=tensor(storage("0"), (4,), (1,)), b=tensor(storage("1"), (4,), (1,))), {"0": bytes(16), "1": bytes(16)})
    data = bytearray(path.read_bytes())
    first, second = data.rfind(b"archive/data/0") - 46, data.rfind(b"archive/data/1") - 46
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    return path


def pickled(thing: object, protocol: int = 2) -> bytes:
    made = io.BytesIO()
    pickle.Pickler(made, protocol).dump(thing)
    return made.getvalue()
