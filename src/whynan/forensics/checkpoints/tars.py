"""The tar that the first versions of torch wrote (before 0.1.10); `torch.load` still reads it, by running its pickles."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import IO

from whynan.forensics.addresses import Unreadable
from whynan.forensics.checkpoints.contents import Contents
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.pickles import Machine
from whynan.forensics.checkpoints.sources import Source
from whynan.forensics.checkpoints.stubs import Global, Storage, TensorStub, Thing
from whynan.forensics.checkpoints.torchfiles import LONGEST_PICKLE, Storages, danger_notes, describe, key_of
from whynan.forensics.checkpoints.walking import Gathered

_BLOCK = 512


def open_tar(source: Source) -> Contents:
    """Open the tar that the first versions of torch wrote."""
    storages = Storages()
    tensors: dict[str, TensorStub] = {}
    with source.open() as file:
        parts = _tar_parts(file, source)
        storages_machine = _read_storages(parts["storages"], storages)
        tensors_machine = _read_tensors(parts["tensors"], storages.named, tensors)
        inner = parts["pickle"]
        file.seek(inner.base)
        machine = Machine(file, min(inner.size, LONGEST_PICKLE), lambda identity: _tar_reference(identity, tensors, storages))
        root = machine.load()
    gathered = Gathered(storages)
    gathered.walk(root)
    notes = danger_notes(storages_machine) + danger_notes(tensors_machine) + danger_notes(machine)
    return Contents("torch tar", source.size, tuple(gathered.entries), gathered.values, notes + gathered.finish())


def _tar_parts(file: IO[bytes], source: Source) -> dict[str, Source]:
    """The members, by their headers of 512 bytes: `tarfile` would read an extended header of any size into memory."""
    found: dict[str, Source] = {}
    at = 0
    while at + _BLOCK <= source.size and len(found) < 16:
        head = source.read(at, _BLOCK, file)
        if not any(head):
            break
        size = _tar_size(head[124:136])
        if head[156:157] in (b"0", b"\0"):
            found[head[:100].rstrip(b"\0").decode("latin1")] = source.part(at + _BLOCK, size)
        at += _BLOCK + (size + _BLOCK - 1) // _BLOCK * _BLOCK
    missing = [n for n in ("storages", "tensors", "pickle") if n not in found]
    if missing:
        raise Unreadable(f"cut short, or a tar archive that is not one of torch: {missing[0]} is missing")
    return found


def _tar_size(field: bytes) -> int:
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        raise Unreadable("a damaged tar archive") from None


def _open_part(source: Source, read: Callable[[IO[bytes], Machine], None]) -> Machine:
    with source.open() as file:
        file.seek(source.base)
        machine = Machine(file, min(source.size, LONGEST_PICKLE))
        read(file, machine)
    return machine


def _count(machine: Machine) -> int:
    count = machine.load()
    if not isinstance(count, int) or not 0 <= count <= 1_000_000:
        raise Unreadable("a damaged file: it declares a number of tensors that cannot be")
    return count


def _read_storages(source: Source, storages: Storages) -> Machine:
    def read(file: IO[bytes], machine: Machine) -> None:
        for _ in range(_count(machine)):
            key, location, kind = _three(machine.load())
            known = storages.named.setdefault(key_of(key), describe(kind, key, location, 0))
            storages.lay(source, file, known.key, FORMATS[known.dtype].size)
        views = machine.load()
        for view in views if isinstance(views, list) else ():
            target, root, start, _ = view
            known = storages.named[key_of(root)]
            storages.named[key_of(target)] = Storage(known.key, known.dtype, 0, known.location, int(start))

    return _guarded(source, read)


def _guarded(source: Source, read: Callable[[IO[bytes], Machine], None]) -> Machine:
    try:
        return _open_part(source, read)
    except (KeyError, ValueError, TypeError, struct.error, OverflowError, OSError):
        raise Unreadable("a damaged file of the first versions of torch") from None


def _three(values: object) -> tuple[object, object, object]:
    if not isinstance(values, tuple) or len(values) != 3:
        raise Unreadable("a damaged file of the first versions of torch")
    return values


def _read_tensors(source: Source, named: dict[str, Storage], tensors: dict[str, TensorStub]) -> Machine:
    def read(file: IO[bytes], machine: Machine) -> None:
        for _ in range(_count(machine)):
            key, storage_key, _ = _three(machine.load())
            storage = named[key_of(storage_key)]
            (dims,) = struct.unpack("<i4x", file.read(8))
            if not 0 <= dims <= 64:
                raise Unreadable("a damaged file: a tensor with a number of dimensions that cannot be")
            sizes, strides = (struct.unpack(f"<{dims}q", file.read(8 * dims)) for _ in range(2))
            (offset,) = struct.unpack("<q", file.read(8))
            tensors[key_of(key)] = TensorStub(storage, storage.dtype, offset, sizes, strides)

    return _guarded(source, read)


def _tar_reference(identity: object, tensors: dict[str, TensorStub], storages: Storages) -> object:
    if isinstance(identity, tuple) and identity and isinstance(identity[0], Global | Thing):
        return identity[0]
    found = tensors.get(str(identity)) or storages.named.get(str(identity)) if isinstance(identity, str | int) else None
    if found is None:
        raise Unreadable("a damaged file: a tensor that is not there")
    return found
