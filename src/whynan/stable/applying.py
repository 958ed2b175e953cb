"""How the autograd functions of this package are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# private in torch, as used by its own Function.apply; without it every call takes the slow way
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def apply(kind: type[Function], *arguments: Any) -> Any:
    """Call an autograd function that has a `setup_context`.

    `Function.apply` inspects the signature of `forward` on every call, which takes ten times as long as a small root; that is
    needed only under torch.func and torch.compile.
    """
    if torch.compiler.is_compiling() or _transforms_active():
        return kind.apply(*arguments)
    return super(Function, kind).apply(*arguments)  # type: ignore[misc]


def finish(fresh: Tensor, operation: str, *arguments: Any) -> Tensor:
    """Apply the last operation of a forward pass to a tensor that nobody else holds: in place, where that is safe.

    Compiled by torch 2.11, an autograd function that returns a tensor it has written in place has the gradient 0.
    """
    in_place = "" if torch.compiler.is_compiling() else "_"
    result: Tensor = getattr(fresh, operation + in_place)(*arguments)
    return result
