"""Let a replay fill gradients of its own: what averages them over ranks must not see a backward pass that the job does not make.

Reducers hang on the nodes at which gradients arrive, in C++, where nothing can be taken off. So for the time of a replay each
weight has another body on the same memory: the same object in Python, with a node that nobody else knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

_own_dispatch = torch.Tensor.__torch_dispatch__
_swap = torch._C._swap_tensor_impl  # type: ignore[attr-defined]


@contextmanager
def doubled(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give weights a double for the time of a replay, where the program is one of a job.

    Values, version counter and the program's own hooks are shared; gradients, and the node where they arrive, are not.
    """
    with ExitStack() as stack:
        for leaf in leaves if dist.is_available() and dist.is_initialized() else ():
            with torch._C.DisableTorchFunction():
                if _can_have_double(leaf):
                    stack.enter_context(_double(leaf))
        yield


def _can_have_double(leaf: torch.Tensor) -> bool:
    plain = type(leaf).__torch_dispatch__ is _own_dispatch
    return plain and leaf.requires_grad and leaf.is_leaf and not leaf.is_inference() and not is_lazy(leaf)


@contextmanager
def _double(leaf: torch.Tensor) -> Iterator[None]:
    body, hooks = leaf.detach().requires_grad_(), leaf._backward_hooks
    body.grad = leaf.grad
    _exchange(leaf, body)
    leaf._backward_hooks = hooks  # they hang on the body
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            _exchange(leaf, body)
            if hooks is None:
                leaf._backward_hooks = None


def _exchange(leaf: torch.Tensor, body: torch.Tensor) -> None:
    try:
        _swap(leaf, body)
    except RuntimeError as error:  # perhaps autocast's cache of cast weights knows a body
        torch.clear_autocast_cache()
        try:
            _swap(leaf, body)
        except RuntimeError:
            raise error from None  # it was something else, which that one says
