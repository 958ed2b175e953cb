"""Find out what the tensors of a batch are from what the step does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.probing.inputs import Input, Role


@dataclass(slots=True)
class Use:
    """What one tensor was used as, and the largest value that fits."""

    role: Role
    limit: int | None = None
    ignore: int | None = None
    padding: int | None = None


class Uses(TorchFunctionMode):
    """Watches which tensors reach an embedding, a mask, a loss's target, an index."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._places = {t.untyped_storage().data_ptr(): i for i, t in enumerate(tensors) if t.layout is torch.strided and t.numel()}
        self.found: dict[int, Use] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(getattr(func, "__name__", ""))
        if rule is not None:
            for tensor, use in rule(args, kwargs):
                self._note(tensor, use)
        return func(*args, **kwargs)

    def _note(self, tensor: Any, use: Use) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            place = self._places.get(tensor.untyped_storage().data_ptr())
            if place is not None and (place not in self.found or self.found[place].role is Role.INTEGERS):
                self.found[place] = use


_Rule = Callable[[Sequence[Any], Mapping[str, Any]], list[tuple[Any, Use]]]


def _arg(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _embedding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Use]]:
    ids, weight, padding = (_arg(args, kwargs, i, n) for i, n in enumerate(("input", "weight", "padding_idx")))
    return [(ids, Use(Role.IDS, weight.shape[0] - 1, padding=padding if isinstance(padding, int) and padding >= 0 else None))]


def _classes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Use]]:
    scores, target = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "target")
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return []
    return [(target, Use(Role.LABELS, scores.shape[1 if scores.dim() > 1 else 0] - 1, ignore=kwargs.get("ignore_index", -100)))]


def _ctc(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Use]]:
    scores = _arg(args, kwargs, 0, "log_probs")
    lengths = [_arg(args, kwargs, i, n) for i, n in ((2, "input_lengths"), (3, "target_lengths"))]
    return [(_arg(args, kwargs, 1, "targets"), Use(Role.LABELS, scores.shape[-1] - 1)), *((t, Use(Role.LENGTHS)) for t in lengths)]


def _mask_at(place: int, name: str) -> _Rule:
    return lambda args, kwargs: [(_arg(args, kwargs, place, name), Use(Role.MASK))]


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Use]]:
    return [(kwargs.get(name), Use(Role.MASK)) for name in ("key_padding_mask", "attn_mask", "src_key_padding_mask")]


def _index(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Use]]:
    source, dim, index = (_arg(args, kwargs, i, n) for i, n in enumerate(("input", "dim", "index")))
    return [(index, Use(Role.INTEGERS, source.shape[dim] - 1 if isinstance(dim, int) and source.dim() else None))]


def _item(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Use]]:
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return [(k, Use(Role.INTEGERS, args[0].shape[0] - 1)) for k in keys[:1] if isinstance(k, torch.Tensor) and k.dtype is not torch.bool and args[0].dim()]


_RULES: dict[str, _Rule] = {
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "cross_entropy": _classes,
    "nll_loss": _classes,
    "ctc_loss": _ctc,
    "masked_fill": _mask_at(1, "mask"),
    "masked_fill_": _mask_at(1, "mask"),
    "masked_select": _mask_at(1, "mask"),
    "where": _mask_at(0, "condition"),
    "scaled_dot_product_attention": _mask_at(3, "attn_mask"),
    "multi_head_attention_forward": _attention,
    "_pack_padded_sequence": lambda args, kwargs: [(_arg(args, kwargs, 1, "lengths"), Use(Role.LENGTHS))],
    "gather": _index,
    "index_select": _index,
    "index_add": _index,
    "scatter_add": _index,
    "__getitem__": _item,
}


def informed(given: Input, use: Use | None) -> Input:
    """Add to a description what its use has told: the vocabulary, the classes, the label that is ignored."""
    if use is None or given.role is Role.OTHER or given.value.dtype is torch.bool:
        return given
    if use.role is Role.MASK:
        two = bool(((given.value == given.value.min()) | (given.value == given.value.max())).all())
        return replace(given, role=Role.MASK, low=min(given.low, 0.0), high=max(float(given.value.max()), 1.0)) if two and not given.stated else given
    if given.value.is_floating_point():
        return given
    low, high = given.low, given.high
    ignore = use.ignore if use.ignore is not None and bool((given.value == use.ignore).any()) else given.ignore
    if ignore is not None:
        rest = given.value[given.value != ignore]
        low = float(rest.min()) if rest.numel() else 0.0
    if use.limit is not None and not given.stated:
        low, high = min(low, 0.0), float(use.limit)
    return replace(given, role=use.role, low=low, high=high, ignore=ignore, padding=given.padding if given.padding is not None else use.padding)
