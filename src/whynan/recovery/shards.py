"""Read directories of `torch.distributed.checkpoint` without running code in them.

torch's own reader unpickles the metadata and every plain value without restriction. Here the metadata may name only
what torch writes into it, and a plain value must pass `weights_only` before torch's planner gets it.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from whynan.recovery.health import Hurt, describe, examine

_RECORDS = "torch.distributed.checkpoint."
_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the records of a checkpoint's metadata, dtypes, sizes and paths, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_RECORDS) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__.startswith(_RECORDS):
                return found
        elif (module, name) in _PLAIN or (module.startswith("pathlib") and isinstance(getattr(pathlib, name, None), type)):
            return super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"the metadata names {module}.{name}, which is no part of a checkpoint")


class _Reader(FileSystemReader):
    """Torch's reader of shards, with our reader of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> records.Metadata:
        found = read_metadata(Path(self.path))
        found.storage_meta = found.storage_meta or records.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    """Torch's planner, given no value that only running code could read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def read_metadata(directory: Path) -> records.Metadata:
    """Return what a directory says it holds."""
    with (directory / ".metadata").open("rb") as file:
        found = _MetadataUnpickler(file).load()
    if not isinstance(found, records.Metadata):
        raise pickle.UnpicklingError(f"the metadata is a {type(found).__name__}")
    return found


def read_into(directory: Path, state: dict[str, Any], alone: bool) -> None:
    """Fill a state from a directory, in place; with other ranks unless alone."""
    with without_warning():
        load_shards(state, storage_reader=_Reader(directory), planner=_Planner(), no_dist=alone)


@contextlib.contextmanager
def without_warning() -> Iterator[None]:
    """One process is not a mistake here, and is not to be warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def rest_of(directory: Path, parts: Collection[str]) -> dict[str, Any]:
    """Return an empty state for what a directory holds beside some parts: all if there are none, else plain values."""
    found = read_metadata(directory)
    state: dict[str, Any] = {}
    paths: Mapping[str, Any] = found.planner_data or {}
    for name, held in found.state_dict_metadata.items():
        path = paths.get(name, (name,))
        if path[0] in parts or (parts and isinstance(held, records.TensorStorageMetadata)):
            continue
        set_element(state, path, _empty(held))
    return state


def misfit(directory: Path, state: Mapping[str, Any]) -> str:
    """Return why the state of some parts cannot be read from a directory, by names and shapes, or an empty text."""
    held = read_metadata(directory).state_dict_metadata
    for name, own in flatten_state_dict(dict(state))[0].items():
        part = name.split(".", 1)[0]
        if name not in held:
            return f"{part!r} does not fit: there is no {name}"
        size = getattr(held[name], "size", None)
        if isinstance(own, torch.Tensor) and size != own.shape:
            return f"{part!r} does not fit: {name} is {'no tensor' if size is None else list(size)} in the files and {list(own.shape)} here"
    return ""


def nonfinite_in(directory: Path, names: Sequence[str], allow: Sequence[str]) -> str:
    """Say which of some tensors are not finite, or nothing. Cost: each is read, one at a time."""
    found = read_metadata(directory).state_dict_metadata
    bad: list[Hurt] = []
    for name in names:
        held = found[name]
        if isinstance(held, records.TensorStorageMetadata) and not any(fnmatchcase(name, p) for p in allow):
            state = {name: _empty(held)}
            read_into(directory, state, alone=True)
            bad += examine(state)
    return describe(bad) if bad else ""


def _empty(held: Any) -> torch.Tensor | None:
    if not isinstance(held, records.TensorStorageMetadata):
        return None
    return torch.empty(held.size, dtype=held.properties.dtype)
