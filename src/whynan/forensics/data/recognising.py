"""What form of data a path holds, told by its first bytes and not by its name alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import islice

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data import arrays, arrow, delimited, folders, tensors
from whynan.forensics.data.images import SUFFIXES, images_in
from whynan.forensics.data.tables import Table

READERS: dict[str, Callable[[Place], list[Table]]] = {
    "npy": arrays.read_npy,
    "npz": arrays.read_npz,
    "safetensors data": tensors.read_safetensors,
    "torch data": tensors.read_torch,
    "parquet": arrow.read_parquet,
    "arrow": arrow.read_arrow,
    "saved dataset": arrow.read_saved_dataset,
    "csv": delimited.read_csv,
    "folder of data files": lambda place: folders.read_folder(place, form_of, READERS),
}

_TEXT = frozenset({".csv", ".tsv", ".psv", ".tab", ".data"})
_CHECKPOINTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp"})
_LOG_X = {"step", "steps", "epoch", "iteration", "iter", "global_step"}
_DATA_WORDS = re.compile(
    r"(^|[^a-z0-9])(x|y|inputs?|ids|tokens?|labels?|targets?|images?|data|features?|embeddings|mask|train|test|val|valid|pixels?|audio|samples|classes)([^a-z0-9]|$)"
)
_WEIGHT = re.compile(r"(^|\.)(weight|bias|running_mean|running_var|exp_avg|exp_avg_sq|in_proj_weight|lora_[ab])(\.|$)|state_dict|optimizer|param_groups|_layer")


def recognise(place: Place) -> str | None:
    """Return the form of a data set, or None where a path is something else: a checkpoint, a log, or nothing that is known."""
    form = form_of(place)
    if form == "csv":
        return None if _is_log(place) else form
    if form in ("safetensors data", "torch data"):
        return form if _holds_data(place, form) else None
    return form


def form_of(place: Place) -> str | None:
    """Return the form of a path by its structure alone: a checkpoint, too, is a file of tensors."""
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
    if folders.data_files(place, form_of):
        return "folder of data files"
    return "image folder" if _mostly_images(place, suffixes) else None


def _mostly_images(place: Place, suffixes: list[str]) -> bool:
    others = sum(s not in SUFFIXES for s in suffixes if s)
    return sum(1 for _ in islice(images_in(place), others + 1)) > others


def _is_log(place: Place) -> bool:
    try:
        names = [n.lower() for n in delimited.find_shape(place).names]
    except Unreadable:
        return False
    return bool(_LOG_X & set(names)) and any("loss" in n or "grad_norm" in n or n in ("lr", "learning_rate") for n in names)


def _holds_data(place: Place, form: str) -> bool:
    try:
        if form == "torch data":
            return looks_like_data((n, tuple(t.shape)) for n, t in tensors.torch_tensors(place))
        header, _ = tensors.safetensors_header(place)
        return looks_like_data((n, tuple(e["shape"])) for n, e in header.items() if n != "__metadata__")
    except (Unreadable, KeyError, TypeError):
        return False


def looks_like_data(named: Iterable[tuple[str, tuple[int, ...]]]) -> bool:
    """Say whether tensors are rows of a data set rather than weights, by their names and lengths.

    >>> looks_like_data([("input_ids", (100, 16)), ("labels", (100,))]), looks_like_data([("fc.weight", (10, 10)), ("fc.bias", (10,))])
    (True, False)
    """
    tensors_ = [(name, shape) for name, shape in named if shape]
    if not tensors_ or any(_WEIGHT.search(name) for name, _ in tensors_):
        return False
    lengths = {shape[0] for _, shape in tensors_}
    return (
        len(tensors_) == 1
        or any(_DATA_WORDS.search(name.lower()) for name, _ in tensors_)
        or (all(name.isdigit() for name, _ in tensors_) and (len(lengths) == 1 or all(len(shape) == 1 for _, shape in tensors_)))
    )
