"""Data sets of the user's own code: iterated once, item by item, and gathered into rows."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from whynan.errors import UsageError
from whynan.forensics.addresses import Unreadable, one_line
from whynan.forensics.data.sources import text_piece
from whynan.forensics.data.tables import Block, Column, Piece, Sort, Table, Trouble, need, plain_dtype

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

_ENDLESS = 100_000  # items taken of what does not say how long it is
_MOST_ERRORS = 100
_GROUP = 256
_PEEK = 16  # items from which the columns are learnt
_GONE = object()  # stands for an item that raised, so that the rows after it keep their numbers


def tables_of_object(spec: str) -> tuple[str, list[Table]]:
    """Import `module:name` and return what it is, and its tables."""
    need("numpy", "checking data")
    held = _load(spec)
    if type(held).__module__.startswith("datasets.") and hasattr(held, "with_format"):
        return "datasets object", _hugging_face(held)
    loader = hasattr(held, "dataset") and hasattr(held, "batch_size")
    return type(held).__name__, [_table(held, loader)]


def _load(spec: str) -> Any:
    """Get the object; this runs the user's own module, as asked."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UsageError(f"{spec}: give module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        held: Any = importlib.import_module(module)
        for part in name.split("."):
            held = getattr(held, part)
        is_data = hasattr(held, "__getitem__") or hasattr(held, "__iter__")
        held = held() if isinstance(held, type) or (callable(held) and not is_data) else held
    except Exception as error:
        raise UsageError(f"{spec}: {type(error).__name__}: {one_line(error)}") from None
    if not hasattr(held, "__getitem__") and not hasattr(held, "__iter__"):
        raise UsageError(f"{spec}: a {type(held).__name__} has no rows")
    return held


def _hugging_face(held: Any) -> list[Table]:
    from whynan.forensics.data.arrow import table_of

    splits = held.items() if isinstance(held, Mapping) else (("", held),)
    return [table_of(name, split.features.arrow_schema, partial(_arrow_batches, split)) for name, split in splits]


def _arrow_batches(split: Any) -> Iterator[Any]:
    for table in split.with_format("arrow").iter(1000):
        yield from table.combine_chunks().to_batches()


def _table(held: Any, loader: bool) -> Table:
    trouble = Trouble("item-raises", "items cannot be had")
    notes: list[str] = []
    once = loader or _comes_once(held)
    if once:
        notes.append("rows come once, or in another order each time: not compared for repeats")
    items = _items(held, trouble, notes)
    rows = _rows_of_batch if loader else _rows_of_item
    head = list(islice(items, _PEEK))
    if not head and not trouble.count:
        raise Unreadable("no rows")
    columns = _columns([rows(item) for item in head])
    waiting = [chain(head, items)]

    def blocks() -> Iterator[Block]:
        """Go on after the items that were looked at; what comes once only must not lose them."""
        again = waiting.pop() if waiting else _items(held, Trouble("", ""), [])
        return _blocks(again, rows, columns, 1 if loader else _GROUP)

    return Table("", columns, blocks, (held.batch_size or 0) if loader else 0, notes, [trouble], again=not once)


def _comes_once(held: Any) -> bool:
    """Say whether an object is an iterator, which ends for good."""
    return hasattr(held, "__next__")


def _columns(samples: list[list[tuple[str, list[Any]]]]) -> tuple[Column, ...]:
    """Take the columns from the first items, each from the first value that is there."""
    first: dict[str, Any] = {}
    for sample in samples:
        for name, values in sample:
            if first.get(name) is None:
                first[name] = next((v for v in values if v is not None), None)
    kinds = {name: _kind(value) for name, value in first.items()}
    return tuple(Column(n, d, s, None if s is Sort.TEXT else shape, named=False) for n, (d, s, shape) in kinds.items())


def _items(held: Any, trouble: Trouble, notes: list[str]) -> Iterator[Any]:
    """Yield every item; of what is indexed, those that raise are written down and the rest go on."""
    length = _length(held)
    if length is not None and hasattr(held, "__getitem__") and not isinstance(held, Mapping):
        for i in range(length):
            try:
                yield held[i]
            except Exception as error:
                if not trouble.count:
                    trouble.message = f"items raise {type(error).__name__}: {one_line(error)}"
                trouble.add(i)
                if trouble.count > _MOST_ERRORS:
                    return
                yield _GONE
        return
    try:
        for i, item in enumerate(islice(iter(held), _ENDLESS + 1 if length is None else length)):
            if length is None and i == _ENDLESS:
                notes.append(f"does not say how long it is: the first {_ENDLESS} items were looked at")
                return
            yield item
    except Exception as error:
        raise Unreadable(f"raises {type(error).__name__}: {one_line(error)}") from None


def _length(held: Any) -> int | None:
    try:
        return len(held)
    except Exception:
        return None


def _rows_of_item(item: Any) -> list[tuple[str, list[Any]]]:
    """Return the fields of one sample, each with its one row."""
    return [(name, [_plain(value)]) for name, value in _fields(item)] if item is not _GONE else []


def _rows_of_batch(item: Any) -> list[tuple[str, list[Any]]]:
    """Return the fields of one batch, each with its rows."""
    return [(name, list(value) if isinstance(value, list | tuple) else list(_plain(value))) for name, value in _fields(item) if not _is_single(value)]


def _is_single(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0 or isinstance(value, int | float | str)


def _fields(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _fields(value, f"{name}.{key}" if name else str(key))
    elif isinstance(item, tuple) or (isinstance(item, list) and item and hasattr(item[0], "shape")):
        names = getattr(item, "_fields", None) or (("x", "y") if len(item) == 2 and not name else map(str, range(len(item))))
        for key, value in zip(names, item, strict=True):
            yield from _fields(value, f"{name}.{key}" if name else str(key))
    else:
        yield name or "item", item


def _plain(value: Any) -> Any:
    """Bring a value to numpy or text."""
    import numpy as np

    if isinstance(value, str):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) in ("torch.bfloat16",) or "float8" in str(value.dtype) else value
        return value.resolve_conj().resolve_neg().numpy()
    if value is None:
        return None
    array = np.asarray(value)
    return array if array.dtype.kind in "fiubcmM" else str(value)


def _kind(value: Any) -> tuple[str, Sort, tuple[int, ...]]:
    import numpy as np

    if value is None or isinstance(value, str):
        return "text", Sort.TEXT, ()
    array = np.asarray(value)
    name, sort = plain_dtype(array.dtype)
    return name, sort, array.shape


def _blocks(items: Iterator[Any], rows: Callable[[Any], list[tuple[str, list[Any]]]], columns: tuple[Column, ...], group: int) -> Iterator[Block]:
    while gathered := [rows(item) for item in islice(items, group)]:
        pieces = []
        for column in columns:
            pieces.append(_piece([v for fields in gathered for v in _values(fields, column.name)], column))
        yield Block(tuple(pieces), sum(p.values.nbytes for p in pieces))


def _values(fields: list[tuple[str, list[Any]]], name: str) -> list[Any]:
    """The rows of one column in one item; as many missing ones where the item has no such field."""
    return dict(fields).get(name) or [None] * (len(fields[0][1]) if fields else 1)


def _piece(values: list[Any], column: Column) -> Piece:
    import numpy as np

    gone = np.array([v is None for v in values])
    missing = gone if gone.any() else None
    if column.sort is Sort.TEXT:
        return text_piece(["" if v is None else str(v) for v in values], missing)
    arrays = [_number_array(v) for v in values]
    alike = column.shape is not None and all(a.shape == column.shape for a, g in zip(arrays, gone, strict=True) if not g)
    if alike and not gone.all():
        stand_in = next(a for a, g in zip(arrays, gone, strict=True) if not g)
        return Piece(np.stack([stand_in if g else a for a, g in zip(arrays, gone, strict=True)]).reshape(len(arrays), -1), missing=missing)
    return Piece(np.concatenate([a.reshape(-1) for a in arrays]), np.array([a.size for a in arrays], np.int64), missing)


def _number_array(value: Any) -> Array:
    import numpy as np

    array = np.zeros(0) if value is None or isinstance(value, str) else np.asarray(value)
    if array.dtype.kind == "c":
        array = np.ascontiguousarray(array).reshape(*array.shape, 1).view(f"f{array.dtype.itemsize // 2}")
    return array.astype(np.int64) if array.dtype.kind in "mM" else array.astype(np.uint8) if array.dtype.kind == "b" else array
