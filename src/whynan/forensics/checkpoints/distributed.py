"""Folders of `torch.distributed.checkpoint`: a pickle that says which tensor lies where, and files of torch archives, end to end."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from itertools import pairwise

from whynan.forensics.addresses import NotLookedAt, Place, Unreadable
from whynan.forensics.checkpoints.contents import Contents, Entry, Scalar, Stream
from whynan.forensics.checkpoints.known import MOST
from whynan.forensics.checkpoints.pickles import Machine
from whynan.forensics.checkpoints.sources import Chain, Source
from whynan.forensics.checkpoints.stubs import Pairs, Thing
from whynan.forensics.checkpoints.torchfiles import LONGEST_PICKLE, danger_notes, open_zip


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    file: str
    start: int
    size: int
    packed: bool


def open_distributed(folder: Place) -> Contents:
    """Open a folder that `torch.distributed.checkpoint.save` wrote."""
    source = Source.of(folder / ".metadata")
    if source.size > LONGEST_PICKLE:
        raise NotLookedAt(f".metadata has {source.size} bytes, more than is looked at")
    data = source.read(0, source.size)
    machine = Machine(io.BytesIO(data), len(data))
    try:
        root = machine.load()
    except Unreadable as why:
        raise type(why)(f".metadata: {why}") from None
    pieces = _pieces(root)
    files = {name: _file(folder, name) for name in sorted({p.file for p in pieces})}
    shapes = _shapes(root)
    parts: dict[str, list[Entry]] = {}
    values: dict[str, Scalar] = {}
    notes: dict[str, None] = dict.fromkeys(danger_notes(machine))
    for piece in pieces:
        if piece.packed:
            notes[f"{piece.name[:100]} is compressed or transformed: not looked into"] = None
            continue
        inside = _open_piece(piece, files[piece.file])
        notes |= dict.fromkeys(inside.notes)
        values |= {_joined(piece.name, n, "value"): v for n, v in inside.values.items()}
        for entry in inside.entries:
            parts.setdefault(_joined(piece.name, entry.name, "tensor"), []).append(entry)
    entries = tuple(_merged(name, found, shapes.get(name)) for name, found in parts.items())
    size = source.size + sum(f.size for f in files.values())
    return Contents(f"distributed checkpoint, {len(files)} file{'s' * (len(files) != 1)}", size, entries, values, tuple(notes))


def _joined(name: str, inner: str, alone: str) -> str:
    return name if inner == alone else f"{name}.{inner}"


def _file(folder: Place, name: str) -> Source:
    place = folder.inside(name)
    try:
        return Source.of(place)
    except Unreadable as why:
        raise type(why)(f"{name[:100]}: {why}") from None


def _open_piece(piece: _Piece, source: Source) -> Contents:
    try:
        return open_zip(source.part(piece.start, piece.size))
    except Unreadable as why:
        raise type(why)(f"{piece.file[:100]}, {piece.name[:100]}: {why}") from None


def _merged(name: str, found: list[Entry], shape: tuple[int, ...] | None) -> Entry:
    """Put the shards of one tensor together; the shape is that of the whole."""
    if len(found) == 1:
        return replace(found[0], name=name)
    streams: tuple[Stream, ...] = tuple(e.stream for e in found)
    return Entry(name, found[0].dtype, shape if shape is not None else (), Chain(streams))


def _pieces(root: object) -> list[_Piece]:
    table = root.attribute("storage_data") if isinstance(root, Thing) else None
    if not isinstance(table, Pairs):
        raise Unreadable(".metadata does not say where the tensors lie")
    pieces = [_piece(index, where) for index, where in table]
    _refuse_overlaps(pieces)
    return pieces


def _refuse_overlaps(pieces: list[_Piece]) -> None:
    """A file whose one piece is named a thousand times would be opened a thousand times."""
    order = sorted(pieces, key=lambda p: (p.file, p.start))
    if any(a.file == b.file and a.start + a.size > b.start for a, b in pairwise(order)):
        raise Unreadable(".metadata is damaged: two tensors lie in the same place")


def _piece(index: object, where: object) -> _Piece:
    if not isinstance(index, Thing) or not isinstance(where, Thing):
        raise Unreadable(".metadata is damaged")
    name, file, start, size = index.attribute("fqn"), where.attribute("relative_path"), where.attribute("offset"), where.attribute("length")
    if not isinstance(name, str) or not isinstance(file, str) or not isinstance(start, int) or not isinstance(size, int):
        raise Unreadable(".metadata is damaged")
    if not 0 <= start < MOST or not 0 <= size < MOST:
        raise Unreadable(".metadata is damaged")
    return _Piece(name, file, start, size, bool(where.attribute("transform_descriptors")))


def _shapes(root: object) -> dict[str, tuple[int, ...]]:
    table = root.attribute("state_dict_metadata") if isinstance(root, Thing) else None
    found: dict[str, tuple[int, ...]] = {}
    for name, about in table if isinstance(table, Pairs) else ():
        size = about.attribute("size") if isinstance(about, Thing) else None
        if isinstance(name, str) and isinstance(size, tuple | list) and all(isinstance(n, int) and 0 <= n < MOST for n in size):
            found[name] = tuple(size)
    return found
