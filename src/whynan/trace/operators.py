"""How torch's functions and operators are called, and the arguments of one by their names in its schema."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_",
               "geometric_", "log_normal_", "set_", "resize_")  # fmt: skip

text_of: Callable[[Any], str] = functools.cache(str)
dtype_name: Callable[[torch.dtype], str] = functools.cache(lambda dtype: str(dtype).removeprefix("torch."))
stem: Callable[[str], str] = functools.cache(lambda text: text.removeprefix("aten.").split(".")[0])


@functools.cache
def overwrites(func: Any) -> bool:
    """Whether an operator writes over its first argument without reading it."""
    return (func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)) in _OVERWRITES


def readable(func: Any) -> str:
    """Name a Python-level torch function: `torch.nn.functional.normalize`, `Tensor.log`."""
    name = getattr(func, "__name__", "") or str(func)
    if name == "__get__":
        return "Tensor." + str(getattr(getattr(func, "__self__", None), "__name__", name))
    home = getattr(func, "__module__", None)
    if home and home != "torch._C":
        return f"{home}.{name}"
    return f"Tensor.{name}" if hasattr(torch.Tensor, name) else f"torch.{name}"


def named_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Pair an operator's arguments with their names in its schema."""
    names = _names_of(func)
    named = [(names[i] if i < len(names) else f"arg{i}", a) for i, a in enumerate(args)]
    return named + list(kwargs.items())


def results_of(args: Any, result: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation gave; what works on lists in place returns nothing and gives its first argument."""
    given = args[0] if result is None and args else result  # a number read out of a tensor is none
    return [t for t in (given if isinstance(given, list | tuple) else [given]) if isinstance(t, torch.Tensor)]


@functools.cache
def _names_of(func: Any) -> list[str]:
    schema = getattr(func, "_schema", None)
    return [a.name for a in schema.arguments] if schema is not None else []
