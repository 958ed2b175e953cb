"""From the records of a pickle to the tensors and plain values of a checkpoint, under dotted names."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from whynan.forensics.addresses import NotLookedAt, Unreadable
from whynan.forensics.checkpoints.contents import BARE, Entry, Scalar, Stream
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.sources import Bytes, Held, swapped
from whynan.forensics.checkpoints.stubs import Array, Global, NamedType, NumpyType, Pairs, Storage, TensorStub, Thing
from whynan.forensics.checkpoints.views import layout_of, view

DEEPEST = 100
MOST_VALUES = 200_000
MOST_TENSORS = 500_000
_LONG_LIST = 1000  # a list of more numbers than this is looked at as a tensor
_LONGEST_TEXT = 1000
_LONGEST_NAME = 1000
_MOST_TEXT = 32 << 20
_MOST_NOTES = 50
_FEW = 16  # what is no longer than this may be looked at again and again
_PACKED = ("quint4x2", "quint2x4")  # several values in a byte: the storage is smaller than the sizes say
_NUMPY = {"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128", "b1": "bool"}
_NUMPY |= {f"i{w}": f"int{w * 8}" for w in (1, 2, 4, 8)} | {f"u{w}": f"uint{w * 8}" for w in (1, 2, 4, 8)}
_MODULE_ROOMS = ("_parameters", "_buffers", "_modules")

FindStorage = Callable[[Storage], Bytes]


@dataclass(slots=True)
class Gathered:
    """What was found so far."""

    find: FindStorage
    big_endian: bool = False
    entries: list[Entry] = field(default_factory=list)
    values: dict[str, Scalar] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    classes: dict[str, None] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)
    text: int = 0  # characters of all names

    def walk(self, root: object, name: str = "") -> None:
        """Visit everything below a record; each container once, however often it is referred to."""
        waiting: list[tuple[str, Iterator[tuple[str, object]]]] = [(name, iter((("", root),)))]
        while waiting:
            above, children = waiting[-1]
            key, item = next(children, (None, None))
            if key is None:
                waiting.pop()
                continue
            path = f"{above}.{key}" if above and key else above or key
            path = f"…{path[-_LONGEST_NAME:]}" if len(path) > _LONGEST_NAME else path
            if self._leaf(path, item) or not self._is_new(item):
                continue
            if len(waiting) > DEEPEST:
                self._note(f"nested more than {DEEPEST} deep: not looked into")
            elif isinstance(item, list | tuple) and len(item) > _LONG_LIST and all(type(v) in (int, float) for v in item):
                self._numbers(path, item)
            else:
                waiting.append((path, self._children(item)))

    def _is_new(self, item: object) -> bool:
        known = id(item) in self.seen
        self.seen.add(id(item))
        return not known

    def _note(self, text: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes[text] = None

    def finish(self) -> tuple[str, ...]:
        """The notes, with the classes that were read as plain values."""
        if not self.classes:
            return tuple(self.notes)
        shown = list(self.classes)[:8]
        more = f" and {len(self.classes) - 8} more classes" if len(self.classes) > 8 else ""
        return (*self.notes, f"holds {', '.join(shown)}{more}: read as plain values")

    def _leaf(self, path: str, item: object) -> bool:
        if item is None or isinstance(item, bool | int | float | str):
            self._value(path, item)
        elif isinstance(item, Array):
            self._array(path, item)
            return item.others is None
        elif isinstance(item, Storage):
            self._tensor(path, TensorStub(item, item.dtype, 0, (item.count,), (1,)))
        elif isinstance(item, TensorStub):
            self._tensor(path, item)
            return not item.beside
        else:
            return isinstance(item, bytes | bytearray | Global | NamedType | NumpyType)
        return True

    def _value(self, path: str, item: Scalar) -> None:
        if len(self.values) >= MOST_VALUES:
            self._note(f"holds more than {MOST_VALUES} plain values: the rest was not looked at")
            return
        self.values[self._free(path or "value")] = item[:_LONGEST_TEXT] if isinstance(item, str) else item

    def _free(self, path: str) -> str:
        """A name that is not taken yet: two keys may read the same as text."""
        self.text += len(path)
        if self.text > _MOST_TEXT:
            raise NotLookedAt("its names are too long to be looked at")
        taken = self.names.get(path, 0)
        self.names[path] = taken + 1
        return f"{path}#{taken + 1}" if taken else path

    def _add(self, path: str, dtype: str, shape: tuple[int, ...], stream: Stream, layout: tuple[int, ...] = ()) -> None:
        if len(self.entries) >= MOST_TENSORS:
            raise NotLookedAt(f"holds more than {MOST_TENSORS} tensors")
        self.entries.append(Entry(self._free(path or BARE), dtype, shape, stream, layout))

    def _numbers(self, path: str, item: list[object] | tuple[object, ...]) -> None:
        packed = array("d", (_as_float(v) for v in item))
        self._add(path, "float64", (len(item),), Held(memoryview(packed).cast("B")))

    def _array(self, path: str, item: Array) -> None:
        if item.data is None or item.kind is None:
            return
        order = item.order
        dtype = _NUMPY.get(item.code)
        if dtype is None:
            return
        form = FORMATS[dtype]
        if item.shape == () and len(item.data) == form.size and form.lanes == 1:
            self._value(path, _scalar(dtype, bytes(item.data), order))
            return
        if math.prod(item.shape) * form.size != len(item.data):
            raise Unreadable(f"{path[:200] or 'array'}: an array declares {math.prod(item.shape)} elements and holds {len(item.data)} bytes")
        stream: Stream = Held(item.data)
        self._add(path, dtype, item.shape, swapped(stream, form.width) if order == ">" else stream)

    def _tensor(self, path: str, item: TensorStub) -> None:
        if item.storage is None:
            self._note(f"{path[:200]} is on the meta device: it has no values")
            return
        form = FORMATS.get(item.dtype)
        if form is None:
            self._note(f"{path[:200]} is {item.dtype[:40] or 'of a dtype'} that is not known: not looked into")
            return
        try:
            stream = self._stream(path, item)
        except Unreadable as why:
            raise type(why)(f"{path[:200] or 'tensor'}: {why}") from None
        turned = swapped(stream, form.width) if self.big_endian else stream
        self._add(path, item.dtype, item.sizes, turned, layout_of(item.sizes, item.strides))

    def _stream(self, path: str, item: TensorStub) -> Stream:
        assert item.storage is not None
        storage = self.find(item.storage)
        if item.dtype in _PACKED:
            return storage
        form = FORMATS[item.dtype]
        sizes, strides = item.sizes, tuple(s * form.lanes for s in item.strides)
        if form.lanes > 1:
            sizes, strides = (*sizes, form.lanes), (*strides, 1)
        offset = item.offset * form.lanes + item.storage.start * FORMATS[item.storage.dtype].size // form.width
        stream, note = view(storage, form.width, offset, sizes, strides)
        if note:
            self._note(f"{path[:200]}: {note}")
        return stream

    def _children(self, item: object) -> Iterator[tuple[str, object]]:
        if isinstance(item, Pairs):
            yield from ((key_text(k), v) for k, v in item.items)
            for attributes in item.attributes:
                yield from self._state(attributes)
        elif isinstance(item, list | tuple):
            yield from ((str(i), v) for i, v in enumerate(item))
        elif isinstance(item, TensorStub):
            for name, value in item.beside:
                yield from self._state(value) if not name else ((name, value),)
        elif isinstance(item, Array):
            yield "", item.others
        elif isinstance(item, Thing):
            yield from self._thing(item)

    def _thing(self, item: Thing) -> Iterator[tuple[str, object]]:
        if isinstance(item.kind, Global):
            if len(self.classes) < 1000:
                self.classes.setdefault(str(item.kind))
        elif item.kind is not None:
            yield "", item.kind
        arguments = item.arguments if isinstance(item.arguments, tuple) else (item.arguments,)
        single = len(arguments) == 1 and not item.states
        if len(arguments) <= _FEW or self._is_new(arguments):
            yield from (("" if single else str(i), v) for i, v in enumerate(arguments))
        for state in item.states:
            yield from self._state(state)
        yield from ((str(i), v) for i, v in enumerate(item.elements))
        yield from ((key_text(k), v) for k, v in item.items)

    def _state(self, state: object) -> Iterator[tuple[str, object]]:
        """Attributes, perhaps in two parts: those of the dictionary and those of the slots."""
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, Pairs):
                yield from _attributes(part) if len(part.items) <= _FEW or self._is_new(part) else ()
            elif part is not None:
                yield "", part


def _attributes(state: Pairs) -> Iterator[tuple[str, object]]:
    """The rooms of a module do not appear in names, nor does the version table of a state dict; a DTensor is its local part."""
    for key, value in state.items:
        text = key_text(key)
        if (text in _MODULE_ROOMS and isinstance(value, Pairs)) or (text == "_local_tensor" and isinstance(value, TensorStub)):
            yield "", value
        elif text != "_metadata":
            yield text, value


def key_text(key: object) -> str:
    """A key of a dictionary as part of a name."""
    if isinstance(key, str):
        return key[:200]
    if isinstance(key, Global):
        return str(key)
    if isinstance(key, tuple):
        return ",".join(str(k)[:40] if isinstance(k, str | int | float) else "…" for k in key[:4])
    return str(key)[:40] if key is None or isinstance(key, bool | int | float) else type(key).__name__


def _as_float(number: object) -> float:
    try:
        return float(number)  # type: ignore[arg-type]
    except OverflowError:
        return float("inf")


def _scalar(dtype: str, data: bytes, order: str) -> Scalar:
    code = {"float16": "e", "float32": "f", "float64": "d", "bool": "?"}.get(dtype)
    if code:
        value: Scalar = struct.unpack(f"{order}{code}", data)[0]
        return value
    return int.from_bytes(data, "big" if order == ">" else "little", signed=dtype.startswith("int"))
