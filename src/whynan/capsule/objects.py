"""Write live objects down as JSON and tensors, without pickle: containers, modules, optimizers, plain objects, functions.

Every object becomes one node of a table, so what was one object stays one object (tied weights, a model that its
optimizer and a global variable share). What cannot be written down is `lost`, with its name and the reason.
"""

from __future__ import annotations

import base64
import collections
import enum
import functools
import logging
import math
import operator
import os
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from whynan.capsule import compact, names
from whynan.capsule.imports import is_library
from whynan.capsule.made import cells
from whynan.capsule.sources import Sources
from whynan.capsule.tensors import Tensors
from whynan.errors import let_through
from whynan.records import Json

NODES = 300_000  # more than any step needs: a data set or a trainer hangs on one of its objects
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque", torch.Size: "size"}
_HOOKS = tuple(k for k in vars(torch.nn.Module()) if k.endswith("_hooks"))
_OBJECT_NEW = object.__new__
_MADE_BY_A_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Unable(Exception):
    """An object cannot be written down; the text says why."""


class Encoder:
    """Turns objects into references to nodes. `encode` never raises for a strange object: it loses it and says so."""

    def __init__(self, tensors: Tensors, sources: Sources) -> None:
        self.tensors, self.sources = tensors, sources
        self.nodes: list[Json] = []
        self.lost: list[str] = []
        self.parts: list[str] = []  # of these, parts of models: a call of the model is not the same without them
        self.doubts: list[str] = []  # what is missing without its use failing
        self._memo: dict[int, Json] = {}
        self._alive: list[object] = []  # an id must not be given away while it is in the memo
        self._equal: dict[object, Json] = {}
        self._path: list[str] = []
        self._depth = 0

    def encode(self, value: Any, path: str = "") -> Json:
        """Return JSON that stands for a value; `path` names it in messages."""
        plain = _plain(value)
        if plain is not NotImplemented:
            return plain  # type: ignore[no-any-return]
        known = self._memo.get(id(value))
        if known is not None:
            return known
        value = _unwatched(value)
        if path:
            self._path.append(path)
        self._depth += 1
        try:
            return self._node(value)
        except Unable as reason:
            return self.lose(str(reason))
        except RecursionError:
            return self.lose("nested too deeply")
        except (LookupError, AttributeError, TypeError, ValueError, ReferenceError) as error:  # a `__getattr__`, `items` or `__reduce__` of the user's
            let_through(error)
            return self.lose(f"{type(value).__name__}: {type(error).__name__}: {error}"[:200])
        finally:
            self._depth -= 1
            if path:
                self._path.pop()

    def lose(self, reason: str) -> Json:
        """Note that the object at the present path is not carried."""
        place = ".".join(self._path) or "a value"
        self.lost.append(f"{place}: {reason}")
        return {"lost": f"{place}: {reason}"}

    def same(self, value: Any) -> Json:
        """Encode an immutable value once, however often an equal one comes (states of random generators)."""
        if value not in self._equal:
            self._equal[value] = self.encode(value)
        return self._equal[value]

    def fresh(self, value: object) -> tuple[int, Json]:
        """Take the next node for an object, so that a cycle finds it while it is being written."""
        if len(self.nodes) >= NODES:
            raise Unable("the step hangs on too many objects")
        index = len(self.nodes)
        reference: Json = {"$": index}
        self.nodes.append(None)
        self._memo[id(value)] = reference
        self._alive.append(value)
        return index, reference

    def _node(self, value: Any) -> Json:
        if self._depth > 200:
            raise Unable("nested too deeply")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        inline = self._inline(value)
        if inline is not None:
            return inline
        index, reference = self.fresh(value)
        try:
            self.nodes[index] = self._body(value)
        except Unable:
            del self._memo[id(value)]
            raise
        return reference

    def _tensor(self, value: torch.Tensor) -> Json:
        body = self.tensors.describe(value)  # may raise Unable
        index, reference = self.fresh(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            body["class"] = self.class_of(type(value))
        hooks = getattr(value, "_backward_hooks", None)
        if hooks:
            self.doubts.append("a hook on a tensor is not carried")
        self.nodes[index] = body
        if self.tensors.with_gradients and value.is_leaf and value.grad is not None:
            body["grad"] = self.encode(value.grad)
        return reference

    def _inline(self, value: Any) -> Json:
        """Objects that need no node: names of things."""
        if isinstance(value, types.ModuleType):
            if names.is_torch_module(value.__name__):
                return {"module": value.__name__}
            return {"import": self.sources.module(value)}
        if isinstance(value, type):
            return self.class_of(value)
        if isinstance(value, logging.Logger):
            return {"logger": value.name}
        if isinstance(value, enum.Enum):
            return {"enum": self.class_of(type(value)), "name": value.name}
        name = names.name_of(value) if callable(value) and not isinstance(value, torch.nn.Module) else None
        return {"torch": name} if name is not None else None

    def _body(self, value: Any) -> Json:
        kind = type(value)
        if kind in _CONTAINERS:
            return {"is": _CONTAINERS[kind], "items": self._items(value)}
        if kind in (dict, collections.OrderedDict, collections.defaultdict):
            default = self.encode(value.default_factory) if kind is collections.defaultdict else None
            return {"is": kind.__name__, "items": self.pairs(value), "default": default}
        if isinstance(value, functools.partial):
            return {"is": "partial", "fn": _there(self.callable(value.func)), "args": self._items(value.args), "kwargs": self.pairs(value.keywords)}
        if isinstance(value, types.MethodType | types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType | None):
            return self._method(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if kind is weakref.ref:
            return {"is": "weakref", "value": self.encode(value())}
        if kind in _SPECIAL:
            return _SPECIAL[kind](value)
        short = self._short(value)
        if short is not None:
            return short
        return self._numpy(value) if kind.__module__ == "numpy" else self._object(value)

    def _short(self, value: Any) -> Json:
        """Objects made in C that a few words say."""
        if place := compact.named(value):
            self.sources.module(sys.modules[place[0]])
            return {"is": "function", "package": place[0], "name": place[1], "line": 0}
        if cache := compact.cached(value):
            return {"is": "cached", "fn": _there(self.callable(cache[0])), "parameters": self.pairs(cache[1])}
        kind = type(value)
        if compact.base_of(kind) is None and not is_library(kind.__module__) and (made := compact.reduced(value)):
            return {"is": "made", "fn": _there(self.encode(made[0])), "args": self._items(made[1])}
        return None

    def _method(self, value: types.MethodType | types.BuiltinMethodType) -> Json:
        owner, name = value.__self__, value.__name__
        found = getattr(owner if isinstance(owner, type) else type(owner), name, None)
        if found is None:
            raise Unable(f"a method {name} that its class does not have")
        return {"is": "method", "self": _there(self.encode(owner)), "name": name}

    def callable(self, function: Any) -> Json:
        """Encode something that is called."""
        if str(getattr(function, "__name__", "")).lstrip("_") == "drop_gradients":
            return {"own": "drop_gradients"}
        return self.encode(function)

    def _items(self, value: Any) -> list[Json]:
        return [self.encode(v, f"[{i}]") for i, v in enumerate(value)]

    def pairs(self, value: Any) -> list[Json]:
        """Encode a mapping as a list of pairs: keys need not be text."""
        found: list[Json] = []
        for key, item in list(value.items()):
            found.append([self.encode(key), self.encode(item, str(key)[:40] if isinstance(key, str | int) else "[]")])
        return found

    def class_of(self, cls: type) -> Json:
        """Name a class: torch's own, one of the user's source, or one of an installed package."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        if names.is_torch_class(path) and getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
            return {"class": path}
        if cls.__module__ == "builtins" and not cls.__flags__ & _MADE_BY_A_STATEMENT:  # so calls itself what `exec` made
            return {"builtin": cls.__name__}
        reference = self.sources.class_(cls)
        if reference is None:
            raise Unable(f"the source of class {cls.__qualname__} was not found")
        self._pending_class(cls, reference)
        return reference

    def _pending_class(self, cls: type, reference: dict[str, Json]) -> None:
        """What a local class sees of the function around it."""
        if "<locals>" not in cls.__qualname__ or "source" not in reference:
            return
        seen: dict[str, Any] = {}
        for method in vars(cls).values():
            seen.update(cells(getattr(method, "__func__", method)))
        seen.pop("__class__", None)
        reference["cells"] = [[k, self.encode(v, k)] for k, v in seen.items()]
        plain = {k: v for k, v in vars(cls).items() if not k.startswith("__") and _plain(v) is not NotImplemented}
        reference["attributes"] = [[k, _plain(v)] for k, v in plain.items()]

    def _function(self, value: types.FunctionType) -> Json:
        reference = self.sources.function(value)
        if reference is None:
            raise Unable(f"the source of function {value.__qualname__} was not found")
        body: dict[str, Json] = {"is": "function", **reference}
        body["defaults"] = self.encode(value.__defaults__)
        body["kwdefaults"] = self.encode(value.__kwdefaults__)
        body["cells"] = [[k, self.encode(v, k)] for k, v in cells(value).items()]
        body["attributes"] = self.pairs({k: v for k, v in vars(value).items() if k != "__wrapped__"})
        return body

    def _numpy(self, value: Any) -> Json:
        import numpy

        if isinstance(value, numpy.generic):
            return {"is": "numpy", "scalar": True, "data": self.encode(torch.from_numpy(numpy.array(value)))}
        if type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            return {"is": "numpy", "scalar": False, "data": self.encode(torch.from_numpy(value.copy()))}
        if isinstance(value, numpy.dtype):
            return {"is": "numpy dtype", "name": value.str}
        raise Unable(f"a {type(value).__name__} of numpy")

    def _object(self, value: Any) -> Json:
        kind = type(value)
        if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise Unable("TorchScript")
        if kind.__module__.startswith("whynan."):
            raise Unable(getattr(kind, "uncarried", "an object of whynan"))
        if isinstance(value, type(os.environ)):
            raise Unable("the environment, which may hold secrets")
        if isinstance(value, torch.nn.Module) and hasattr(value, "_orig_mod"):
            return {"is": "same", "value": self.encode(value._orig_mod)}
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            return {"is": "same", "value": self.encode(value.module)}
        base = compact.base_of(kind)
        if base is None:
            name = getattr(value, "__name__", "")
            raise Unable(f"a {kind.__name__} of {kind.__module__}{f' named {name}' if isinstance(name, str) and name else ''}")
        body: dict[str, Json] = {"is": "object"}
        parametrized = isinstance(value, torch.nn.Module) and "parametrizations" in value._modules
        body["class"] = self.class_of(kind.__bases__[0] if parametrized else kind)
        body["parametrized"] = parametrized
        if base is not object:
            body["base"] = base.__name__
            body["items"] = self.pairs(value) if base is dict else [] if base is types.SimpleNamespace else self._items(value)
        body["state"] = self._state(value)
        return body

    def _state(self, value: Any) -> list[Json]:
        found: list[Json] = []
        state = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                state[slot] = getattr(value, slot)
        module = isinstance(value, torch.nn.Module)
        for key, item in state.items():
            if key in ("_compiled_call_impl",) or (key == "step" and isinstance(value, torch.optim.Optimizer)):
                continue
            kept = self._hooks(item, key) if module and key in _HOOKS else self.encode(item, key)
            if not (isinstance(kept, dict) and "lost" in kept):
                found.append([key, kept])
            if module and key == "_modules":
                self.parts += _lost_in(self.nodes, kept)
        return found

    def _hooks(self, hooks: Any, key: str) -> Json:
        """Carry the hooks of torch's own utilities (weight_norm); those of the user only if their source is there."""
        kept: dict[int, Any] = {}
        for number, hook in hooks.items() if hasattr(hooks, "items") else ():
            plain = getattr(hook, "__wrapped__", hook)
            if not (isinstance(plain, bool) or callable(plain)):
                continue
            kept[number] = plain
        return self.encode(collections.OrderedDict(kept), key)


def _there(reference: Json) -> Json:
    """Return a reference, unless what it stands for was lost: then what is made of it is lost as well."""
    if isinstance(reference, dict) and "lost" in reference:
        raise Unable(str(reference["lost"]).partition(": ")[2])
    return reference


def _lost_in(nodes: list[Json], reference: Json) -> list[str]:
    """Return what of a mapping was lost."""
    node = nodes[reference["$"]] if isinstance(reference, dict) and isinstance(reference.get("$"), int) else None  # type: ignore[index]
    items = node.get("items") if isinstance(node, dict) else None
    values = [pair[1] for pair in items if isinstance(pair, list)] if isinstance(items, list) else []
    return [str(value["lost"]) for value in values if isinstance(value, dict) and "lost" in value]


def _unwatched(value: Any) -> Any:
    """See through what watching itself put around a function."""
    while isinstance(value, types.FunctionType) and str(value.__globals__.get("__name__")).startswith("whynan.") and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _plain(value: Any) -> Any:
    """Return values that JSON holds as they are, or that one short object says; NotImplemented for the rest."""
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    made = _SHORT.get(type(value))
    return made(value) if made is not None else NotImplemented


_SHORT: dict[type, Callable[[Any], Json]] = {
    torch.dtype: lambda v: {"dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"device": str(v)},
    torch.memory_format: lambda v: {"format": str(v).removeprefix("torch.")},
    torch.layout: lambda v: {"layout": str(v).removeprefix("torch.")},
    torch.qscheme: lambda v: {"qscheme": str(v).removeprefix("torch.")},
    complex: lambda v: {"complex": [repr(v.real), repr(v.imag)]},
    bytes: lambda v: {"bytes": base64.b64encode(v).decode()},
    type(Ellipsis): lambda v: {"ellipsis": True},
    type(NotImplemented): lambda v: {"lost": "NotImplemented"},
}


def _slice(value: Any) -> Json:
    try:
        ends: list[Json] = [v if v is None else operator.index(v) for v in (value.start, value.stop, value.step)]  # numpy's integers too
    except (TypeError, RuntimeError):
        raise Unable("a slice whose ends are no whole numbers") from None
    return {"is": type(value).__name__, "ends": ends}


_SPECIAL: dict[type, Callable[[Any], Json]] = {
    slice: _slice,
    range: _slice,
    re.Pattern: lambda v: {"is": "pattern", "text": v.pattern, "flags": v.flags},
    pathlib.PosixPath: lambda v: {"is": "path", "text": str(v)},
    pathlib.WindowsPath: lambda v: {"is": "path", "text": str(v)},
    torch.Generator: lambda v: {"is": "generator", "state": base64.b64encode(bytes(v.get_state().tolist())).decode(), "device": str(v.device)},
}


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        found += [s for s in ((slots,) if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__")]
    return found
