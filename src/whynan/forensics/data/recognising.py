"""What form of data a path holds, told by its first bytes and not by its name alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data import arrays, arrow, delimited, folders, tensors
from whynan.forensics.data.images import SUFFIXES, images_in
from whynan.forensics.data.tables import Table

READERS: dict[str, Callable[[Place], list[Table]]] = {
    "npy": arrays.read_npy,
    "npz": arrays.read_npz,
    "safetensors data": tensors.read_tensors,
    "torch data": tensors.read_tensors,
    "parquet": arrow.read_parquet,
    "arrow": arrow.read_arrow,
    "saved dataset": arrow.read_saved_dataset,
    "csv": delimited.read_csv,
    "folder of data files": lambda place: folders.read_folder(place, recognise, READERS),
}

_TEXT = frozenset({".csv", ".tsv", ".psv", ".tab", ".data"})
_CHECKPOINTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp"})


def recognise(place: Place) -> str | None:
    """Return the form of a path by its structure, or None. A checkpoint, too, is a file of tensors, and a log a table: `kind_of` tells them apart."""
    try:
        return _folder_form(place) if place.is_dir() else _file_form(place)
    except Unreadable:
        return None


def _file_form(place: Place) -> str | None:
    with place.open() as file:
        head = file.read(512)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"PK\x03\x04"):
        return "npz" if b".npy" in head or place.suffix == ".npz" else "torch data" if place.suffix in _CHECKPOINTS else None
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if place.suffix in SUFFIXES:
        return "image"
    if head[8:9] == b"{" and head[:8] != b"" and place.size() >= 8 + int.from_bytes(head[:8], "little"):
        return "safetensors data"
    return _by_name(place, head)


def _by_name(place: Place, head: bytes) -> str | None:
    """What has no mark of its own, or lost it: the reader will say what is wrong."""
    known = {".npy": "npy", ".npz": "npz", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".safetensors": "safetensors data"}
    if place.suffix in known:
        return known[place.suffix]
    if place.suffix in _CHECKPOINTS and head[:1] == b"\x80":
        return "torch data"
    return "csv" if place.suffix in _TEXT else None


def _folder_form(place: Place) -> str | None:
    names = [c.name for c in islice(place.children(), 4096)]
    if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= set(names):
        return "saved dataset"
    suffixes = [Place(n).suffix for n in names]
    if any(s in _CHECKPOINTS for s in suffixes):
        return None
    if folders.data_files(place, recognise):
        return "folder of data files"
    return "image folder" if _mostly_images(place, suffixes) else None


def _mostly_images(place: Place, suffixes: list[str]) -> bool:
    others = sum(s not in SUFFIXES for s in suffixes if s)
    return sum(1 for _ in islice(images_in(place), others + 1)) > others
