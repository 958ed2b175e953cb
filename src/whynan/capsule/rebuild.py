"""Make objects again from the nodes of a capsule. Without trust only tensors, containers and torch's own classes."""

from __future__ import annotations

import base64
import binascii
import collections
import functools
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import PurePath
from types import MethodType
from typing import Any, Protocol

import torch

from whynan.capsule.names import CapsuleError, class_named, first_line, function_named, module_named
from whynan.capsule.stepped import step_again

_BUILTINS = {t.__name__: t for t in (int, float, bool, str, bytes, list, tuple, dict, set, frozenset, object, complex, type, slice, range, type(None))}
_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque, "size": torch.Size,
}  # fmt: skip
_BASES = ("dict", "list", "set", "SimpleNamespace")
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


_MISMADE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, binascii.Error, re.error)
_CUDA = re.compile(r"cuda(:\d+)?")


class NeedsTrust(CapsuleError):
    """The capsule can only be played by running code that came with it."""


class Code(Protocol):
    """Whoever runs the user's source, if anybody may."""

    def class_(self, node: dict[str, Any]) -> type: ...
    def function(self, node: dict[str, Any]) -> Any: ...
    def module(self, name: str) -> Any: ...


class Refusing:
    """Runs nothing."""

    def class_(self, node: dict[str, Any]) -> type:
        raise NeedsTrust("code")

    def function(self, node: dict[str, Any]) -> Any:
        raise NeedsTrust("code")

    def module(self, name: str) -> Any:
        raise NeedsTrust("code")


class Lost:
    """Stands for something the capsule does not carry; any use says so."""

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CapsuleError(f"the capsule does not carry {self.__dict__['what']}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise CapsuleError(f"the capsule does not carry {self.__dict__['what']}")


class Decoder:
    """Turns references into objects; an object referred to twice is made once."""

    def __init__(self, nodes: list[Any], tensors: dict[str, torch.Tensor], code: Code | None = None) -> None:
        self.nodes, self.tensors = nodes, tensors
        self.code: Code = code or Refusing()
        self.unwritten: list[tuple[torch.Tensor, Any]] = []  # with the place that asked for the memory
        self.meant: list[torch.Tensor] = []
        self.moved: set[str] = set()  # devices that are not here
        self.extra: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()

    def decode(self, value: Any) -> Any:
        """Return the object a piece of JSON stands for."""
        if isinstance(value, str) and _CUDA.fullmatch(value) and not torch.cuda.is_available():
            return str(self.device(value))  # a device by name: an argument of `to`, an attribute of a model
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if not isinstance(value, dict) or not value:
            raise CapsuleError(f"the capsule holds something that is not an object: {str(value)[:60]!r}")
        if "$" in value:
            return self._referred(value["$"])
        key = next(iter(value))
        known = _INLINE.get(key)
        if known is None and key not in self.extra:
            raise CapsuleError(f"the capsule holds an unknown kind of object: {key[:40]!r}")
        try:
            return known(self, value) if known is not None else self.extra[key](value)
        except _MISMADE as error:
            raise CapsuleError(f"the capsule holds a {key} that is none: {first_line(error)}") from None

    def _referred(self, index: Any) -> Any:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(self.nodes):
            raise CapsuleError("the capsule refers to an object that is not in it")
        if index in self._made:
            return self._made[index]
        if index in self._open:
            raise CapsuleError("the capsule holds an object that contains itself")
        node = self.nodes[index]
        kind = node.get("is") if isinstance(node, dict) else None
        maker = _KINDS.get(kind) if isinstance(kind, str) else None
        if maker is None and kind not in self.extra:
            raise CapsuleError(f"the capsule holds an unknown kind of object: {str(kind)[:40]!r}")
        self._open.add(index)
        try:
            made = maker(self, node, index) if maker is not None else self.extra[str(kind)](node)
        except _MISMADE as error:
            raise CapsuleError(f"object {index} of the capsule ({kind}) cannot be made: {first_line(error)}") from None
        finally:
            self._open.discard(index)
        self._made[index] = made
        return made

    def pairs(self, items: Any) -> list[tuple[Any, Any]]:
        """Decode a list of pairs."""
        if not isinstance(items, list) or any(not isinstance(p, list) or len(p) != 2 for p in items):
            raise CapsuleError("the capsule holds a mapping that is not one")
        return [(self.decode(k), self.decode(v)) for k, v in items]

    def items(self, items: Any) -> list[Any]:
        """Decode a list."""
        if not isinstance(items, list):
            raise CapsuleError("the capsule holds a list that is not one")
        return [self.decode(v) for v in items]

    def device(self, name: str) -> torch.device:
        """Return a device, or the CPU where that one is not here."""
        wanted = torch.device(name)
        if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
            self.moved.add(name)
            return torch.device("cpu") if not torch.cuda.is_available() else torch.device("cuda", 0)
        return wanted

    def class_of(self, node: Any) -> type:
        """Return the class a node names."""
        found = self.decode(node)
        if not isinstance(found, type):
            raise CapsuleError("the capsule names something as a class that is none")
        return found

    def _list(self, node: dict[str, Any], index: int) -> Any:
        if node["is"] in ("list", "deque"):
            made: Any = [] if node["is"] == "list" else collections.deque()
            self._made[index] = made
            made.extend(self.items(node["items"]))
            return made
        return _LISTS[node["is"]](self.items(node["items"]))

    def _dict(self, node: dict[str, Any], index: int) -> Any:
        made: Any = {} if node["is"] == "dict" else collections.OrderedDict()
        if node["is"] == "defaultdict":
            made = collections.defaultdict(self.decode(node["default"]))
        self._made[index] = made
        made.update(self.pairs(node["items"]))
        return made

    def _tensor(self, node: dict[str, Any], index: int) -> torch.Tensor:
        made = self._values(node)
        if "class" in node:
            made = made.as_subclass(self.class_of(node["class"]))  # type: ignore[arg-type]
        grad = bool(node["requires_grad"])
        if node["kind"] == "Parameter":
            made = torch.nn.Parameter(made, requires_grad=grad)
        elif node["kind"] == "Buffer":
            made = torch.nn.Buffer(made)
        elif grad:
            made.requires_grad_()
            made = made if node.get("leaf", True) else made.clone()  # what code unseen by the tape made is no parameter
        self._made[index] = made
        if node.get("unwritten"):
            self.unwritten.append((made, node.get("made_at")))
        if node.get("meant"):
            self.meant.append(made)
        if node.get("grad") is not None:
            made.grad = self.decode(node["grad"])
        return made

    def _values(self, node: dict[str, Any]) -> torch.Tensor:
        dtype, shape, device = _DTYPES[node["dtype"]], [int(n) for n in node["shape"]], self.device(node["device"])
        if "sparse" in node:
            indices, values = (self._data(k) for k in node["sparse"])
            return torch.sparse_coo_tensor(indices, values, shape, device=device).coalesce()
        data = self._data(node["data"])
        if dtype.is_complex:
            data = torch.view_as_complex(data)
        if data.dtype != dtype:
            raise CapsuleError(f"tensor {node['data']} of the capsule is {data.dtype}, not {dtype}")
        stride = [int(n) for n in node["stride"]]
        small = [1 if s == 0 and n > 1 else n for n, s in zip(shape, stride, strict=True)]
        if data.numel() == 0 or tuple(data.stride()) == tuple(stride):
            return data.reshape(shape).to(device)
        span = 1 + sum((n - 1) * s for n, s in zip(small, stride, strict=True))
        if span > 64 * data.numel() + (1 << 20):
            stride = list(data.stride())  # a thin slice of something large: its strides are not worth the memory
        with torch.no_grad():
            made = torch.empty_strided(small, stride, dtype=dtype, device=device).copy_(data.reshape(small))
        return made.expand(shape) if small != shape else made

    def _data(self, key: Any) -> torch.Tensor:
        found = self.tensors.get(key) if isinstance(key, str) else None
        if found is None:
            raise CapsuleError(f"tensor {str(key)[:20]} is not in the capsule")
        return found

    def _object(self, node: dict[str, Any], index: int) -> Any:
        cls = self.class_of(node["class"])
        base = node.get("base")
        if base == "tuple":
            made: Any = tuple.__new__(cls, self.items(node["items"]))
        elif base in _BASES:
            made = _maker(cls).__new__(cls)
        else:
            made = object.__new__(cls)
        self._made[index] = made
        if base == "dict":
            for key, value in self.pairs(node["items"]):
                _maker(cls).__setitem__(made, key, value)
        elif base in ("list", "set"):
            (list.extend if base == "list" else set.update)(made, self.items(node["items"]))  # type: ignore[operator]
        self._fill(made, node["state"])
        if node.get("parametrized"):
            _parametrize(made)
        return made

    def _fill(self, made: Any, state: Any) -> None:
        for key, value in self.pairs(state):
            if not isinstance(key, str):
                raise CapsuleError("the capsule names an attribute that is not text")
            if hasattr(made, "__dict__"):
                made.__dict__[key] = value
            else:
                object.__setattr__(made, key, value)
        if isinstance(made, torch.nn.Module):
            made.__dict__.setdefault("_compiled_call_impl", None)

    def _function(self, node: dict[str, Any], index: int) -> Any:
        made = self.code.function(node)
        self._made[index] = made
        for key, value in self.pairs(node.get("attributes", [])):
            setattr(made, str(key), value)
        return made

    def _numpy(self, node: dict[str, Any], index: int) -> Any:
        array = self.decode(node["data"]).numpy()
        return array[()] if node["scalar"] else array


def _parametrize(module: Any) -> None:
    from torch.nn.utils import parametrize

    parametrize._inject_new_class(module)
    for name in module._modules["parametrizations"]:
        parametrize._inject_property(module, name)


def _maker(cls: type) -> Any:
    """Return the class made in C that stands behind one made by a statement: OrderedDict is no mere dict."""
    return next(base for base in cls.__mro__ if not base.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


def _cached(decoder: Decoder, node: dict[str, Any], index: int) -> Any:
    return functools.lru_cache(**dict(decoder.pairs(node["parameters"])))(decoder.decode(node["fn"]))


def _from_parts(decoder: Decoder, node: dict[str, Any], index: int) -> Any:
    if isinstance(decoder.code, Refusing):
        raise NeedsTrust("code")
    return decoder.decode(node["fn"])(*decoder.items(node["args"]))


def _generator(decoder: Decoder, node: dict[str, Any], index: int) -> torch.Generator:
    made = torch.Generator(decoder.device(node["device"]))
    made.set_state(torch.frombuffer(bytearray(base64.b64decode(node["state"])), dtype=torch.uint8))
    return made


def _pattern(decoder: Decoder, node: dict[str, Any], index: int) -> Any:
    return re.compile(str(node["text"])[:10_000], int(node["flags"]))


def _ends(decoder: Decoder, node: dict[str, Any], index: int) -> Any:
    ends = decoder.items(node["ends"])
    return slice(*ends) if node["is"] == "slice" else range(*ends)


def _partial(decoder: Decoder, node: dict[str, Any], index: int) -> Any:
    return functools.partial(decoder.decode(node["fn"]), *decoder.items(node["args"]), **dict(decoder.pairs(node["kwargs"])))


def _method(decoder: Decoder, node: dict[str, Any], index: int) -> Any:
    owner, name = decoder.decode(node["self"]), node["name"]
    found = getattr(type(owner), name, None)
    # without trust: only the forward pass of a module may be had this way
    if not (isinstance(owner, torch.nn.Module) and name in ("forward", "__call__")) and isinstance(decoder.code, Refusing):
        raise NeedsTrust("code")
    return MethodType(found, owner) if found is not None and not isinstance(owner, type) else getattr(owner, name)


Maker = Callable[[Decoder, dict[str, Any], int], Any]
_KINDS: dict[str, Maker] = {
    **dict.fromkeys(_LISTS, Decoder._list), **dict.fromkeys(("dict", "OrderedDict", "defaultdict"), Decoder._dict),
    "tensor": Decoder._tensor, "object": Decoder._object, "function": Decoder._function, "numpy": Decoder._numpy,
    "numpy dtype": lambda d, n, i: __import__("numpy").dtype(str(n["name"])[:8]), "generator": _generator, "pattern": _pattern,
    "slice": _ends, "range": _ends, "partial": _partial, "method": _method, "cached": _cached, "made": _from_parts,
    "path": lambda d, n, i: PurePath(str(n["text"])),
    "weakref": lambda d, n, i: weakref.ref(d.decode(n["value"])), "same": lambda d, n, i: d.decode(n["value"]),
}  # fmt: skip


def drop_gradients(tensors: list[torch.Tensor]) -> None:
    """Do what `zero_grad` does."""
    for tensor in tensors:
        tensor.grad = None


def _own(decoder: Decoder, node: dict[str, Any]) -> Any:
    if node["own"] == "drop_gradients":
        return drop_gradients
    optimizer = decoder.decode(node["of"])
    if node["own"] != "optimizer_step" or not isinstance(optimizer, torch.optim.Optimizer):
        raise CapsuleError(f"the capsule names an unknown function: {str(node['own'])[:40]!r}")
    return functools.partial(step_again, optimizer)


def _applied(decoder: Decoder, node: dict[str, Any]) -> Any:
    cls = decoder.class_of(node["apply"])
    if not issubclass(cls, torch.autograd.Function):
        raise CapsuleError("the capsule applies a class that is no autograd function")
    return cls.apply


def _builtin(decoder: Decoder, node: dict[str, Any]) -> type:
    if node["builtin"] not in _BUILTINS:
        raise CapsuleError(f"the capsule names an unknown class: {str(node['builtin'])[:40]!r}")
    return _BUILTINS[node["builtin"]]


def _member(decoder: Decoder, node: dict[str, Any]) -> Any:
    return decoder.class_of(node["enum"])[str(node["name"])]  # type: ignore[index]


def _named(group: str, names: tuple[str, ...], value: Any) -> Any:
    if value not in names:
        raise CapsuleError(f"the capsule names an unknown {group}: {str(value)[:40]!r}")
    return getattr(torch, value)


_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
_QSCHEMES = ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric", "per_channel_affine_float_qparams")
_INLINE: dict[str, Callable[[Decoder, dict[str, Any]], Any]] = {
    "float": lambda d, n: {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}[n["float"]],
    "complex": lambda d, n: complex(*[float(v) for v in n["complex"]]),
    "bytes": lambda d, n: base64.b64decode(n["bytes"]),
    "dtype": lambda d, n: _DTYPES[n["dtype"]],
    "device": lambda d, n: d.device(n["device"]),
    "format": lambda d, n: _named("memory format", _FORMATS, n["format"]),
    "layout": lambda d, n: _named("layout", ("strided", "sparse_coo", "sparse_csr"), n["layout"]),
    "qscheme": lambda d, n: _named("quantisation scheme", _QSCHEMES, n["qscheme"]),
    "ellipsis": lambda d, n: ...,
    "lost": lambda d, n: Lost(str(n["lost"])[:200]),
    "torch": lambda d, n: function_named(str(n["torch"])),
    "class": lambda d, n: class_named(str(n["class"])),
    "builtin": _builtin,
    "module": lambda d, n: module_named(str(n["module"])),
    "import": lambda d, n: d.code.module(str(n["import"])),
    "logger": lambda d, n: logging.getLogger(str(n["logger"])[:80]),
    "enum": _member,
    "source": lambda d, n: d.code.class_(n),
    "package": lambda d, n: d.code.class_(n),
    "own": _own,
    "apply": _applied,
}
