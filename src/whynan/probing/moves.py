"""Simple changes of a batch: zeros, constants, equal rows, one row, extremes, everything masked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from whynan.probing.inputs import Input, Role

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Move:
    """A changed batch, and whether its values stay in the ranges of the inputs."""

    name: str
    values: tuple[torch.Tensor, ...]
    inside: bool
    reshapes: bool = False


def moves(inputs: Sequence[Input]) -> Iterator[Move]:
    """Yield changes of the whole batch first, then of each input alone, then of pairs."""
    yield from _whole(inputs)
    for number, given in enumerate(inputs):
        for name, change in _changes(given):
            made = _changed(inputs, {number: change})
            if made is not None:
                yield Move(f"{name} in {given.name}", made, given.holds(made[number]))
    yield from _pairs(inputs)


def _changed(inputs: Sequence[Input], changes: dict[int, Change]) -> tuple[torch.Tensor, ...] | None:
    """Apply changes; None where they change nothing."""
    made = [i.value for i in inputs]
    with torch.no_grad():
        for number, change in changes.items():
            old = inputs[number].value
            new = change(old.detach().clone())
            made[number] = new.requires_grad_(old.requires_grad) if new.is_floating_point() else new
    same = all(m is i.value or (m.shape == i.value.shape and torch.equal(m, i.value)) for m, i in zip(made, inputs, strict=True))
    return None if same else tuple(made)


def rows_of(inputs: Sequence[Input]) -> int:
    """Return the batch size: the commonest length of the first dimension."""
    sizes = [i.value.shape[0] for i in inputs if _is_plain(i.value) and i.value.dim()]
    return max(set(sizes), key=sizes.count) if sizes else 0


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _whole(inputs: Sequence[Input]) -> Iterator[Move]:
    floats = {n: i for n, i in enumerate(inputs) if i.role is Role.FLOATS}
    rows = rows_of(inputs)
    batched = [n for n, i in enumerate(inputs) if _is_plain(i.value) and i.value.dim() and i.value.shape[0] == rows]
    if rows > 1:
        yield from _made("identical rows", inputs, dict.fromkeys(batched, _same_rows))
        yield from _made("batch of one", inputs, dict.fromkeys(batched, lambda t: t[:1].clone()), reshapes=True)
        yield from _made("two identical rows", inputs, dict.fromkeys(batched, _two_rows))
    if len(floats) > 1:
        yield from _made("zeros everywhere", inputs, dict.fromkeys(floats, torch.zeros_like))
        yield from _made("constants everywhere", inputs, {n: _constant(i) for n, i in floats.items()})
    yield from _lengths(inputs, batched)


def _lengths(inputs: Sequence[Input], batched: list[int]) -> Iterator[Move]:
    """Shorter and longer sequences: the second dimension where several inputs share it, or ids have one."""
    sizes = [inputs[n].value.shape[1] for n in batched if inputs[n].value.dim() > 1]
    ids = [inputs[n].value.shape[1] for n in batched if inputs[n].role is Role.IDS and inputs[n].value.dim() == 2]
    length = ids[0] if ids else next((s for s in sizes if sizes.count(s) > 1 or any(inputs[n].value.dim() == 3 for n in batched)), 0)
    chosen = [n for n in batched if inputs[n].value.dim() > 1 and inputs[n].value.shape[1] == length]
    if length > 1:
        yield from _made("length-1 sequences", inputs, dict.fromkeys(chosen, lambda t: t[:, :1].clone()), reshapes=True)
        yield from _made("sequences four times as long", inputs, dict.fromkeys(chosen, lambda t: torch.cat([t] * 4, 1)), reshapes=True)


def longer(inputs: Sequence[Input]) -> Iterator[Move]:
    """Yield the batch with one of its first two dimensions repeated many times, in all inputs that share its size."""
    for dim in (1, 0):
        sizes = [i.value.shape[dim] for i in inputs if _is_plain(i.value) and i.value.dim() > max(dim, 1)]
        for size in sorted(set(sizes), key=sizes.count, reverse=True)[:2]:
            chosen = [n for n, i in enumerate(inputs) if _is_plain(i.value) and i.value.dim() > dim and i.value.shape[dim] == size]
            if sum(inputs[n].value.numel() for n in chosen) < 1 << 20:
                changes = dict.fromkeys(chosen, _repeated(dim))
                for move in _made(f"dimension {dim} forty times as long", inputs, changes, reshapes=True):
                    yield replace(move, inside=False)


def _made(name: str, inputs: Sequence[Input], changes: dict[int, Change], reshapes: bool = False) -> Iterator[Move]:
    made = _changed(inputs, changes)
    if made is not None:
        yield Move(name, made, all(i.holds(v) for i, v in zip(inputs, made, strict=True)), reshapes)


def _pairs(inputs: Sequence[Input]) -> Iterator[Move]:
    for a, first in enumerate(inputs):
        for b, second in enumerate(inputs[a + 1 :], a + 1):
            if first.value.shape == second.value.shape and first.role is second.role is Role.FLOATS and first.value.dtype is second.value.dtype:
                for source, number in ((first, b), (second, a)):
                    yield from _made(f"{first.name} equal to {second.name}", inputs, {number: _copy_of(source.value)})


def _repeated(dim: int) -> Change:
    return lambda t: torch.cat([t] * 40, dim)


def _copy_of(source: torch.Tensor) -> Change:
    return lambda t: source.detach().clone()


def _same_rows(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand_as(t).clone()


def _two_rows(t: torch.Tensor) -> torch.Tensor:
    t[1] = t[0]
    return t


def _constant(given: Input) -> Change:
    middle = float(given.value.detach().double()[torch.isfinite(given.value)].mean())
    return lambda t: torch.full_like(t, middle)


def _filled(value: float) -> Change:
    return lambda t: torch.full_like(t, _fitting(value, t.dtype))  # type: ignore[arg-type]


def _fitting(value: float, dtype: torch.dtype) -> float:
    """Keep a number inside a type: torch refuses one that is not."""
    return min(max(value, -torch.finfo(dtype).max), torch.finfo(dtype).max) if dtype.is_floating_point and math.isfinite(value) else value


def _part(index: tuple[int | slice, ...], value: float | torch.Tensor) -> Change:
    def change(t: torch.Tensor) -> torch.Tensor:
        t[index] = _fitting(value, t.dtype) if isinstance(value, float) else value
        return t

    return change


def _changes(given: Input) -> Iterator[tuple[str, Change]]:
    if given.role is Role.FLOATS:
        yield from _float_changes(given)
    elif given.role is Role.MASK:
        yield from _mask_changes(given)
    elif given.role is not Role.OTHER:
        yield from _integer_changes(given)


def _float_changes(given: Input) -> Iterator[tuple[str, Change]]:
    dims, everything = given.value.dim(), slice(None)
    yield "zeros", torch.zeros_like
    yield "a constant", _constant(given)
    yield "the lowest value", _filled(given.low)
    yield "the highest value", _filled(given.high)
    yield "one value at its lowest", _part((0,) * dims, given.low)
    yield "one value at its highest", _part((0,) * dims, given.high)
    yield "denormal values", lambda t: t.sign() * torch.finfo(t.dtype).tiny / 4
    yield "tiny values", lambda t: t * 1e-20
    yield "alternating extremes", lambda t: torch.where(t > t.median(), _filled(given.high)(t), _filled(given.low)(t))
    if dims:
        yield "a row of zeros", _part((0,), 0.0)
        yield "one value of zero", _part((0,) * dims, 0.0)
        yield "identical rows", _same_rows
    if dims > 1:
        yield "constant rows", lambda t: t.flatten(1).mean(1).reshape(-1, *[1] * (dims - 1)).expand_as(t).clone()
        yield "a constant row", lambda t: _part((0,), float(t[0].mean()))(t)
        yield "a constant column", lambda t: _part((everything, 0), float(t[:, 0].mean()))(t)
        yield "a column of zeros", _part((everything, 0), 0.0)
        yield "equal values along the last dimension", lambda t: t.mean(-1, keepdim=True).expand_as(t).clone()
        yield "a last column of zeros", _part((..., 0), 0.0)  # type: ignore[arg-type]
    if dims > 2:
        yield "no change along the second dimension", lambda t: t[:, :1].expand_as(t).clone()
        yield "zeros after the first step", _part((everything, slice(1, None)), 0.0)


def _mask_changes(given: Input) -> Iterator[tuple[str, Change]]:
    """Small changes first: what breaks by a column says more than what breaks by everything."""
    dims = given.value.dim()
    sides = ((given.off, "off"), (given.on, "on"))
    for value, word in sides:
        if dims > 1:
            yield f"a column {word}", _part((slice(None), 0), value)
            yield f"all but the first {word}", _part((slice(None), slice(1, None)), value)
    for value, word in sides:
        if dims:
            yield f"a row {word}", _part((0,), value)
    for value, word in sides:
        yield f"everything {word}", _filled(value)


def _integer_changes(given: Input) -> Iterator[tuple[str, Change]]:
    words = {"the smallest": given.low, "the largest": given.high, "padding": given.padding, "the ignored label": given.ignore}
    for word, value in words.items():
        if value is None or not torch.iinfo(given.value.dtype).min <= value <= torch.iinfo(given.value.dtype).max:
            continue
        yield f"only {word}", _filled(int(value))
        if given.value.dim():
            yield f"a row of {word}", _part((0,), int(value))
    if given.value.dim():
        yield "only the first value", lambda t: t.flatten()[0].expand_as(t).clone()
        yield "identical rows", _same_rows
        yield "two values the same", lambda t: _part((-1,), t.flatten()[0])(t) if t.dim() == 1 else _same_rows(t)
    if given.role is Role.LENGTHS:
        yield "only ones", torch.ones_like
        yield "one less", lambda t: (t - 1).clamp_min(0)
    if given.role is Role.INTEGERS:
        yield "only zeros", torch.zeros_like
