"""Data kept as tensors: safetensors, and `torch.save` files that hold nothing but tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data.sources import Reader, Source, are_samples, as_rows, from_file, tables_of
from whynan.forensics.data.tables import Table, need, one_line

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

_LONGEST_HEADER = 100_000_000  # the limit of the format itself
_PLAIN = {"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "?", "C64": "c8"} | {f"{k}{8 * n}": f"{k.lower()}{n}" for k in "IU" for n in (1, 2, 4, 8)}
_COARSE = {"BF16": ("u2", "bfloat16"), "F8_E4M3": ("u1", "float8_e4m3fn"), "F8_E5M2": ("u1", "float8_e5m2")}


def read_safetensors(place: Place) -> list[Table]:
    """Open a safetensors file that holds data."""
    need("numpy", "reading tensors")
    header, start = safetensors_header(place)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    sources = [s for name, entry in entries.items() if (s := _source(place, name, entry, start)) is not None]
    if not sources:
        raise Unreadable("no tensor in it has rows")
    return tables_of(sources)


def safetensors_header(place: Place) -> tuple[dict[str, Any], int]:
    """Return the header, and where the values begin."""
    size = place.size()
    with place.open() as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise Unreadable("not a safetensors header")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"its header is not JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict):
        raise Unreadable("its header is not a table of tensors")
    return header, 8 + length


def _source(place: Place, name: str, entry: Any, start: int) -> Source | None:
    import math

    import numpy as np

    try:
        kind, shape, (low, high) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise Unreadable(f"{name}: its entry in the header is damaged") from None
    code, shown = (_PLAIN[kind], "") if kind in _PLAIN else _COARSE.get(kind, ("", ""))
    if not code:
        raise Unreadable(f"{name}: {kind} is not a type of data that is known here")
    dtype = np.dtype(code)
    if min((*shape, low), default=0) < 0 or high - low != math.prod(shape) * dtype.itemsize or start + high > place.size():
        raise Unreadable(f"{name}: truncated, or its header is damaged: {math.prod(shape) * dtype.itemsize} bytes declared")
    if not shape:
        return None
    begin = from_file(place.open, start + low, dtype)
    if not shown:
        return Source(name, dtype, shape, begin)
    return Source(name, np.dtype("f4"), shape, lambda width: _widened(begin(width), shown), shown)


def _widened(read: Reader, shown: str) -> Reader:
    def wide(rows: int) -> Array:
        import numpy as np

        values = read(rows)
        if shown == "bfloat16":
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        torch = need("torch", f"reading {shown}")
        return np.asarray(torch.from_numpy(values.copy()).view(getattr(torch, shown)).float().numpy())

    return wide


def read_torch(place: Place) -> list[Table]:
    """Open a file of `torch.save` that holds a tensor, or tensors in a list or dictionary; nothing in it is executed."""
    need("numpy", "reading tensors")
    tensors = [(n, t) for n, t in torch_tensors(place) if t.dim() and str(t.layout) == "torch.strided" and not t.is_quantized and t.device.type == "cpu"]
    if not tensors:
        raise Unreadable("no tensor in it has rows")
    sources = [_tensor_source(n, t) for n, t in tensors]
    listed = all(n.isdigit() and t.dim() == 1 for n, t in tensors)
    return [as_rows(place.name.rsplit(".", 1)[0], sources)] if listed and are_samples(sources) else tables_of(sources)


def torch_tensors(place: Place) -> list[tuple[str, Any]]:
    """Return the tensors of a `torch.save` file by their dotted names."""
    torch = need("torch", "reading .pt files")
    try:
        held = torch.load(place.open() if place.remote else place.address, map_location="cpu", weights_only=True, mmap=None if place.remote else True)
    except Exception:
        held = _load_without_map(torch, place)
    found: list[tuple[str, Any]] = []
    _gather(torch, held, "", found)
    return [(name or place.name.rsplit(".", 1)[0], tensor) for name, tensor in found]


def _load_without_map(torch: Any, place: Place) -> Any:
    """Files in the old format cannot be mapped."""
    try:
        with place.open() as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except Unreadable:
        raise
    except Exception as error:
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise Unreadable("holds more than tensors and plain values: opening it would run code") from None
        raise Unreadable(f"torch cannot read it: {one_line(error)}") from None


def _gather(torch: Any, held: Any, name: str, found: list[tuple[str, Any]], depth: int = 0) -> None:
    if isinstance(held, torch.Tensor):
        found.append((name, held.detach()))
        return
    if depth > 8:
        return
    children = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, list | tuple) else ()
    for key, value in children:
        _gather(torch, value, f"{name}.{key}" if name else str(key), found, depth + 1)


def _tensor_source(name: str, tensor: Any) -> Source:
    import numpy as np
    import torch

    coarse = tensor.dtype in (torch.bfloat16, *(getattr(torch, n) for n in dir(torch) if n.startswith("float8_")))
    shown = str(tensor.dtype).removeprefix("torch.") if coarse else ""
    dtype = np.dtype("f4") if coarse else torch.empty(0, dtype=tensor.dtype).numpy().dtype

    def begin(width: int) -> Reader:
        laid = tensor.view(-1, width) if tensor.is_contiguous() and width else tensor
        done = 0

        def read(rows: int) -> Array:
            nonlocal done
            done += rows
            part = laid[done - rows : done].resolve_conj().resolve_neg()
            return np.asarray((part.float() if coarse else part).reshape(rows, width).numpy())

        return read

    return Source(name, dtype, tuple(tensor.shape), begin, shown, foldable=tensor.is_contiguous())
