"""How torch functions are treated while recording: which write, which draw random numbers, which only look."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

_EMPTY = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})
# names of everything torch tags as drawing from a random generator, by stem
_RANDOM_STEMS = (
    "rand", "bernoulli", "multinomial", "normal", "dropout", "uniform", "exponential", "cauchy", "geometric", "log_normal",
    "poisson", "rrelu", "gumbel_softmax", "scaled_dot_product_attention", "standard_gamma", "sample_dirichlet", "binomial",
    "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout", "lstm", "gru", "rnn_", "fractional_max_pool",
)  # fmt: skip
_PROBES = frozenset({"isnan", "isinf", "isfinite", "item", "__float__", "tolist", "allclose", "numpy"})
_PASSED = frozenset(
    {"backward", "grad", "requires_grad_", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "__len__", "__hash__",
     "__repr__", "__format__", "_set_grad_enabled", "get_device",
     "register_post_accumulate_grad_hook", "data_ptr", "is_contiguous", "untyped_storage", "storage", "__reduce_ex__",
     "_fix_weakref", "__deepcopy__", "manual_seed", "__bool__", "__int__", "__index__", "ndimension", "share_memory_"}
)  # fmt: skip
_HANGERS = frozenset({"register_hook", "retain_grad"})
_WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "copyto"})


class Sort(IntEnum):
    """How a torch function is treated while recording."""

    PASS = 0  # never makes or changes a tensor
    CALL = 1
    WRITE = 2  # changes an argument in place
    RANDOM = 3
    PROBE = 4  # the user looks at a value: isnan(loss), loss.item()
    GRAD = 5  # reads or sets .grad
    BLANK = 6  # makes a tensor that nothing was written to
    HANG = 7  # hangs something on a tensor that the way back will come to
    CUT = 8  # takes a value out of its history


def sort_of(func: Callable[..., Any]) -> Sort:
    """Classify a torch function, by its name as a rule."""
    if func in _EMPTY:
        return Sort.BLANK
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "grad":
            return Sort.GRAD
        if name != "__get__":
            return Sort.WRITE if attribute == "data" else Sort.PASS
        if attribute == "data":
            return Sort.CUT
        return Sort.CALL if attribute in ("T", "mT", "H", "mH", "real", "imag") else Sort.PASS
    if name in _PROBES:
        return Sort.PROBE
    if name == "detach":
        return Sort.CUT
    if name in _HANGERS:
        return Sort.HANG
    if name in _PASSED or name.startswith(("is_", "_record_function", "set_", "get_", "has_")):
        return Sort.PASS
    if name.lstrip("_").startswith(_RANDOM_STEMS) or "dropout" in name:
        return Sort.RANDOM
    if name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
        return Sort.WRITE
    return Sort.CALL
