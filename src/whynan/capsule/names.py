"""The torch functions and classes a capsule may name: calling them runs no code but torch's own.

A capsule is mailed around, so a name in it is looked up in these tables and nowhere else. What reads or writes files,
unpickles, or takes raw memory is left out.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch


class CapsuleError(Exception):
    """A capsule that cannot be read or played: one line, said to the user as it is."""


def first_line(error: BaseException) -> str:
    r"""Return the beginning of what an error says, or its kind where it says nothing.

    >>> first_line(ValueError("no such group\nof parameters")), first_line(KeyError())
    ('no such group', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


_NOT_ALLOWED = frozenset(
    {"from_file", "apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "storage", "untyped_storage",
     "set_", "share_memory_", "module_load", "numpy", "data_ptr", "save", "load", "compile", "storage_type", "from_dlpack",
     "to_dlpack", "frombuffer", "boolean_dispatch", "handle_torch_function"}
)  # fmt: skip
_ARITHMETIC = "add|sub|mul|truediv|div|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift"
_DUNDER = re.compile(rf"__(?:[ri]?(?:{_ARITHMETIC})|neg|pos|abs|invert|getitem|setitem|eq|ne|lt|le|gt|ge|contains)__")
PROPERTIES = ("T", "mT", "H", "mH", "real", "imag", "data", "grad")
_ATEN = re.compile(r"aten::(\w+)\.(\w+)")
_CLASS_HOMES = re.compile(r"torch\.(nn\.modules|optim|amp|distributions|nn\.utils|nn\.parameter|nn\.attention)(\.\w+)*")
_PLAIN_CLASSES = ("argparse:Namespace", "types:SimpleNamespace")
_MODULES = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "math")


def _allowed(name: str) -> bool:
    if name.startswith("__"):
        return _DUNDER.fullmatch(name) is not None
    return name not in _NOT_ALLOWED and (not name.startswith("_") or name.startswith(("_foreach_", "_amp_")))


def _of_namespace(label: str, owner: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        value = getattr(owner, name, None)
        if _allowed(name) and callable(value) and not isinstance(value, type | ModuleType):
            yield f"{label}.{name}", value


def _spoken() -> Iterator[tuple[str, Any]]:
    """Yield every allowed function with its name, the usual name of each first."""
    functional: Any = torch.nn.functional
    yield from _of_namespace("torch", torch, dir(torch._C._VariableFunctions) + list(torch.functional.__all__))
    yield from _of_namespace("torch.Tensor", torch.Tensor, dir(torch.Tensor))
    yield from _of_namespace("torch.nn.functional", functional, dir(functional))
    for name in dir(functional):
        value = getattr(functional, name)
        if getattr(value, "__module__", "") == "torch.nn.functional" and not isinstance(value, type):
            yield f"torch.nn.functional.{name}", value
    for label in ("torch.linalg", "torch.fft", "torch.special", "torch.nn.init", "torch._C._nn", "torch.sparse"):
        owner = functools.reduce(getattr, label.split(".")[1:], torch)
        yield from _of_namespace(label, owner, dir(owner))
    for label in _SINGLE:
        yield label, _attribute(label)


_SINGLE = (
    "torch.autograd.grad", "torch.autograd.backward", "torch.func.functional_call", "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_", "torch.nn.utils.get_total_norm", "torch.nn.utils.clip_grads_with_norm_",
    "torch.is_tensor", "torch.is_floating_point", "torch.nn.utils.rnn.pad_sequence",
)  # fmt: skip


def _attribute(label: str) -> Any:
    module, name = label.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """Return the allowed functions by name."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in _spoken():
        found.setdefault(name, value)
    return found


@functools.cache
def _labels() -> dict[int, str]:
    labels: dict[int, str] = {}
    for name, value in functions().items():
        labels.setdefault(id(value), name)
    return labels


def name_of(function: Any) -> str | None:
    """Return the name under which a capsule may carry a torch function, or None.

    >>> name_of(torch.sqrt), name_of(torch.Tensor.T.__get__), name_of(torch.load)
    ('torch.sqrt', 'torch.Tensor.T.__get__', None)
    """
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__") and getattr(owner, "__name__", "") in PROPERTIES:
        return f"torch.Tensor.{owner.__name__}.{function.__name__}"  # type: ignore[union-attr]
    if isinstance(function, torch._ops.OpOverload) and _ATEN.fullmatch(f"{function._schema.name}.{function._overloadname}"):
        return f"{function._schema.name}.{function._overloadname}"
    known = _labels().get(id(function))
    # a watched door stands in the namespace, its original on the tape
    return known or next((s for s in _SINGLE if _plain_name(function) == s), None)


def _plain_name(function: Any) -> str:
    module = str(getattr(function, "__module__", ""))
    home = {"torch.nn.utils.clip_grad": "torch.nn.utils", "torch._functorch.functional_call": "torch.func"}.get(module, module)
    return f"{home}.{getattr(function, '__name__', '')}"


def function_named(name: str) -> Callable[..., Any]:
    """Return the allowed function of that name.

    >>> function_named("torch.Tensor.exp") is torch.Tensor.exp
    True
    """
    parts = name.split(".")
    if len(parts) == 4 and parts[:2] == ["torch", "Tensor"] and parts[2] in PROPERTIES and parts[3] in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(torch.Tensor, parts[2]), parts[3])  # type: ignore[no-any-return]
    aten = _ATEN.fullmatch(name)
    if aten is not None and aten[1] not in _NOT_ALLOWED:
        return getattr(getattr(torch.ops.aten, aten[1]), aten[2])  # type: ignore[no-any-return]
    known = functions().get(name)
    if known is None:
        raise CapsuleError(f"the capsule names a function that is not on the list of torch functions: {name[:80]!r}")
    return known


def is_torch_class(path: str) -> bool:
    """Whether a class, as `module:qualname`, may be rebuilt without running anything but torch."""
    module, _, qualname = path.partition(":")
    return path in _PLAIN_CLASSES or (_CLASS_HOMES.fullmatch(module) is not None and qualname.isidentifier())


def class_named(path: str) -> type:
    """Return a class of torch's by `module:qualname`."""
    module, _, qualname = path.partition(":")
    if not is_torch_class(path):
        raise CapsuleError(f"the capsule names a class that is not on the list of torch classes: {path[:80]!r}")
    try:
        found = getattr(importlib.import_module(module), qualname)
    except (ImportError, AttributeError):
        raise CapsuleError(f"this torch ({torch.__version__}) has no {module}.{qualname}") from None
    if not isinstance(found, type) or found.__module__ != module:
        raise CapsuleError(f"the capsule names a class that is not on the list of torch classes: {path[:80]!r}")
    return found


def module_named(name: str) -> ModuleType:
    """Return a torch namespace by name."""
    if name not in _MODULES:
        raise CapsuleError(f"the capsule names a module that is not torch's: {name[:80]!r}")
    return importlib.import_module(name)


def is_torch_module(name: str) -> bool:
    """Whether a namespace may be named by a capsule."""
    return name in _MODULES
