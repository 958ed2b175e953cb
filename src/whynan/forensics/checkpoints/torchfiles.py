"""What `torch.save` writes: the zip of today, and the stream of pickles before it; the tar before that is in `tars`."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from typing import IO

from whynan.forensics.addresses import NotLookedAt, Unreadable
from whynan.forensics.checkpoints.archives import Archive
from whynan.forensics.checkpoints.contents import Contents
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.known import MOST, dtype_of
from whynan.forensics.checkpoints.pickles import Danger, Machine
from whynan.forensics.checkpoints.sources import Bytes, Deflated, Source, Span
from whynan.forensics.checkpoints.stubs import Pairs, Storage
from whynan.forensics.checkpoints.walking import Gathered

LONGEST_PICKLE = 128 << 20
MAGIC = 0x1950A86A20F9469CFC6C


_SAID = {
    Danger.CALLS: "dangerous: loading this file calls {}",
    Danger.HANDS_ON: "dangerous: loading this file hands {} to what it calls",
    Danger.NAMES: "names {}, which runs code where it is called; here it is not",
}


def danger_notes(machine: Machine) -> tuple[str, ...]:
    """What a pickle would have done if it had been loaded; nothing of it was."""
    return tuple(_SAID[how].format(name) for name, how in sorted(machine.dangers.items(), key=lambda item: -item[1])[:20])


def pickle_name(archive: Archive) -> str | None:
    """The entry that holds the pickle of a torch archive, whatever the file was called when it was written."""
    return next((n for n in archive.entries if n == "data.pkl" or (n.endswith("/data.pkl") and n.count("/") == 1)), None)


def open_zip(source: Source) -> Contents:
    """Open the zip that `torch.save` writes."""
    with source.open() as file:
        return _open_archive(source, Archive.of(source, file))


def _open_archive(source: Source, archive: Archive) -> Contents:
    name = pickle_name(archive)
    if name is None:
        raise NotLookedAt("a zip archive, but not one of torch")
    root = name.removesuffix("data.pkl")
    order = archive.read(f"{root}byteorder", 16) if f"{root}byteorder" in archive.entries else b"little"
    gathered = Gathered(_ZipStorages(archive, root), big_endian=order == b"big")
    notes: tuple[str, ...] = ()
    for part in (name, f"{root}constants.pkl"):
        if part in archive.entries:
            gathered.find = _ZipStorages(archive, root + ("data/" if part == name else "constants/"))
            data = archive.read(part, LONGEST_PICKLE)
            machine = Machine(io.BytesIO(data), len(data), _zip_storage)
            gathered.walk(machine.load())
            notes += danger_notes(machine)
    scripted = f"{root}constants.pkl" in archive.entries
    return Contents("TorchScript" if scripted else "torch zip", source.size, tuple(gathered.entries), gathered.values, notes + gathered.finish())


@dataclass(slots=True)
class _ZipStorages:
    """Finds storages in an archive; each local header is read once."""

    archive: Archive
    folder: str
    found: dict[str, Span | Deflated] = field(default_factory=dict)

    def __call__(self, storage: Storage) -> Bytes:
        if storage.key not in self.found:
            self.found[storage.key] = self.archive.content(self.folder + storage.key)
        content = self.found[storage.key]
        declared = storage.count * FORMATS[storage.dtype].size
        if declared > content.size:
            raise Unreadable(f"a storage declares {declared} bytes, {content.size} are there")
        return content


def _zip_storage(identity: object) -> object:
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise Unreadable("a damaged pickle: a storage is described wrongly")
    _, kind, key, location, count = identity[:5]
    return describe(kind, key, location, count)


def describe(kind: object, key: object, location: object, count: object, start: object = 0) -> Storage:
    """A storage as a pickle describes it; raises `Unreadable`."""
    dtype = dtype_of(kind)
    if not dtype or not isinstance(count, int) or not isinstance(start, int) or not 0 <= count < MOST or not 0 <= start < MOST:
        raise Unreadable("a damaged pickle: a storage is described wrongly")
    return Storage(key_of(key), dtype, count, location[:40] if isinstance(location, str) else "", start)


def key_of(key: object) -> str:
    """The name of a storage; only of what is a name, since the text of a tuple that shares its parts has no end."""
    if not isinstance(key, str | int):
        raise Unreadable("a damaged pickle: a storage is described wrongly")
    return str(key)[:200]


@dataclass(slots=True)
class Storages:
    """The storages of the older files: what was asked for, and where it turned out to lie."""

    named: dict[str, Storage] = field(default_factory=dict)
    places: dict[str, Span] = field(default_factory=dict)

    def __call__(self, storage: Storage) -> Bytes:
        place = self.places.get(storage.key)
        if place is None:
            raise Unreadable("cut short: a storage is missing")
        return place

    def lay(self, source: Source, file: IO[bytes], key: str, width: int) -> None:
        """Take the storage that begins here: its number of elements in eight bytes, then the values."""
        head = file.read(8)
        if len(head) != 8:
            raise Unreadable("cut short: a storage is missing")
        count = struct.unpack("<q", head)[0]
        start = file.tell() - source.base
        self.places[key] = source.span(start, count * width)
        file.seek(source.base + start + count * width)


def open_legacy(source: Source) -> Contents:
    """Open the stream of pickles that `torch.save` wrote before version 1.6."""
    storages = Storages()

    def persistent(identity: object) -> object:
        return _legacy_storage(identity, storages)

    with source.open() as file:
        file.seek(source.base)
        machine = Machine(file, min(source.size, LONGEST_PICKLE), persistent)
        if machine.load() != MAGIC or machine.load() != 1001:
            raise NotLookedAt("not a file that torch wrote")
        system, root, keys = machine.load(), machine.load(), machine.load()
        for key in keys if isinstance(keys, list) else ():
            known = storages.named.get(key_of(key))
            if known is None:
                raise Unreadable("a damaged file: a storage that no tensor asks for")
            storages.lay(source, file, known.key, FORMATS[known.dtype].size)
    little = not isinstance(system, Pairs) or system.get("little_endian") is not False
    gathered = Gathered(storages, big_endian=not little)
    gathered.walk(root)
    return Contents("torch legacy", source.size, tuple(gathered.entries), gathered.values, danger_notes(machine) + gathered.finish())


def _legacy_storage(identity: object, storages: Storages) -> object:
    if not isinstance(identity, tuple) or len(identity) < 2:
        raise Unreadable("a damaged pickle: a storage is described wrongly")
    if identity[0] == "module":
        return identity[1]
    if identity[0] != "storage" or len(identity) != 6:
        raise Unreadable("a damaged pickle: a storage is described wrongly")
    _, kind, key, location, count, part = identity
    root = storages.named.setdefault(key_of(key), describe(kind, key, location, count))
    if part is None:
        return root
    _, start, size = part
    return describe(kind, key, location, size, start)
