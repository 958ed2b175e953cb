"""Find out by its content, not by its name, what kind of checkpoint something is; and open it. Nothing in it is run."""

from __future__ import annotations

import io
from collections.abc import Callable

from whynan.forensics.addresses import NotLookedAt, Place, Unreadable, is_text
from whynan.forensics.checkpoints.archives import Archive
from whynan.forensics.checkpoints.contents import Contents
from whynan.forensics.checkpoints.distributed import open_distributed
from whynan.forensics.checkpoints.folders import kind_of_folder, open_parts, open_shards
from whynan.forensics.checkpoints.members import LFS
from whynan.forensics.checkpoints.pickles import Machine
from whynan.forensics.checkpoints.safetensors import LONGEST_HEADER, open_safetensors
from whynan.forensics.checkpoints.sources import Bytes, Source
from whynan.forensics.checkpoints.stubs import Storage
from whynan.forensics.checkpoints.tars import open_tar
from whynan.forensics.checkpoints.torchfiles import LONGEST_PICKLE, danger_notes, open_legacy, open_zip, pickle_name
from whynan.forensics.checkpoints.walking import Gathered

_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c, after the protocol and perhaps a frame
_TAR_PARTS = (b"storages\0", b"tensors\0", b"pickle\0", b"sys_info\0")
_OTHERS = {
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"PK": "a zip archive of something else",
}


def recognise(place: Place) -> str | None:
    """Say what kind of checkpoint a file or folder is, or None; damaged ones are recognised by how they begin.

    **Cost:** the first bytes of a file, and the table of contents of an archive; the names in a folder.
    """
    try:
        return kind_of_folder(place) if place.is_dir() else _kind_of_file(Source.of(place))
    except (Unreadable, OSError):
        return None


def open_checkpoint(place: Place) -> Contents:
    """Open a checkpoint without reading a tensor; raises `Unreadable` with the reason.

    Notes that begin with `dangerous:` say what loading the file would have run; with `missing:`, which tensors an index names in vain.

    **Cost:** the pickle or header, at most 128 MB; never the tensors.
    """
    try:
        return _open_folder(place) if place.is_dir() else _open_file(place)
    except OSError as error:
        raise NotLookedAt((error.strerror or "cannot be read").lower()) from None
    except (MemoryError, RecursionError):
        raise NotLookedAt("too large or too deeply nested to be looked at") from None


def _open_folder(folder: Place) -> Contents:
    kind = kind_of_folder(folder)
    if kind is None:
        raise NotLookedAt("a folder that is not a checkpoint")
    if kind == "distributed checkpoint":
        return open_distributed(folder)
    if kind == "shards":
        return open_shards(folder, _open_file)
    return open_parts(folder, kind, _open_file, _open_folder)


def _open_file(place: Place) -> Contents:
    source = Source.of(place)
    kind = _kind_of_file(source)
    if kind is not None:
        return _READERS[kind](source)
    head = source.read(0, min(source.size, 4096))
    if not head:
        raise Unreadable("empty")
    if head.startswith(LFS):
        raise NotLookedAt("a Git LFS pointer, not the file itself; fetch it with git lfs pull")
    if not any(head):
        raise Unreadable("begins with zeros: it was never written to the end")
    other = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), "")
    if other or is_text(head):
        raise NotLookedAt(f"{other or 'a text'}, not a checkpoint that is known")
    raise Unreadable("does not begin like a checkpoint of any format: overwritten, or of a kind that is not known")


def _kind_of_file(source: Source) -> str | None:
    head = source.read(0, min(source.size, 512))
    if head[:4] == b"PK\x03\x04":
        return _kind_of_zip(source, head)
    if head[:1] == b"\x80" and _MAGIC in head[2:32]:
        return "torch legacy"
    if head[257:262] == b"ustar" and head.startswith(_TAR_PARTS):
        return "torch tar"
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and head[8:].lstrip(b" \t\r\n")[:1] == b"{" and length <= max(LONGEST_HEADER, source.size):
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    return None


def _kind_of_zip(source: Source, head: bytes) -> str | None:
    try:
        return "torch zip" if pickle_name(Archive.of(source)) is not None else None
    except Unreadable:
        first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return "torch zip" if first.endswith((b"data.pkl", b".format_version")) else None


def _open_pickle(source: Source) -> Contents:
    """Open a pickle that torch did not write: only where it holds plain values and numpy arrays."""
    if source.size > LONGEST_PICKLE:
        raise NotLookedAt(f"a bare pickle of {source.size} bytes: only torch.save and safetensors files can be looked at without running them")
    data = source.read(0, source.size)
    machine = Machine(io.BytesIO(data), len(data))
    gathered = Gathered(_no_storage)
    gathered.walk(machine.load())
    notes = danger_notes(machine)
    if gathered.classes and not notes:
        raise NotLookedAt(
            f"a bare pickle that holds {next(iter(gathered.classes))[:100]}: only torch.save and safetensors files can be looked at without running them"
        )
    return Contents("pickle", source.size, tuple(gathered.entries), gathered.values, notes + gathered.finish())


def _no_storage(storage: Storage) -> Bytes:
    raise NotLookedAt("a pickle that refers to something outside itself")


_READERS: dict[str, Callable[[Source], Contents]] = {
    "torch zip": open_zip,
    "torch legacy": open_legacy,
    "torch tar": open_tar,
    "safetensors": open_safetensors,
    "pickle": _open_pickle,
}
