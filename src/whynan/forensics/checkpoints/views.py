"""From a storage to the bytes of a tensor in it: offset, sizes and strides, checked against what is there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whynan.forensics.addresses import Unreadable
from whynan.forensics.checkpoints.contents import Stream
from whynan.forensics.checkpoints.sources import Bytes, Chain, Cut, Held, Picked, Repeated, Span, split_longest

_BLOCK = 1 << 22  # the most that one strided block spans
_ROWS = 1 << 20  # a view with more separate rows than this is read with its gaps

Dims = tuple[tuple[int, int], ...]


def view(storage: Bytes, width: int, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Stream, str]:
    """Return the bytes of a view, and a note where more than its own values had to be taken.

    `width` is that of one number; offset and strides count numbers.
    """
    if len(sizes) != len(strides) or min((offset, *sizes, *strides), default=0) < 0:
        raise Unreadable("a tensor is described wrongly: sizes, strides and offset do not fit")
    if 0 in sizes:
        return Held(b""), ""
    dims = tuple(sorted(((n, s) for n, s in zip(sizes, strides, strict=True) if n > 1 and s), key=lambda d: -d[1]))
    times = math.prod(n for n, s in zip(sizes, strides, strict=True) if not s)
    reach = sum((n - 1) * s for n, s in dims) + 1
    taken = cut(storage, offset * width, reach * width)
    stream, note = (taken, "") if reach == math.prod(n for n, _ in dims) else _with_gaps(taken, width, dims)
    return (Repeated(stream, times) if times > 1 else stream), note


def layout_of(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return in which order the dimensions of a view lie in memory, or nothing where that is their own.

    >>> layout_of((4, 3), (3, 1)), layout_of((3, 4), (1, 3)), layout_of((1, 4), (9, 1))
    ((), (1, 0), ())
    """
    own = [i for i, n in enumerate(sizes) if n > 1 and strides[i]]
    there = sorted(own, key=lambda i: -strides[i])
    return () if there == own else tuple(there)


def cut(storage: Bytes, start: int, size: int) -> Stream:
    """A stretch of a storage; raises `Unreadable` where it reaches beyond the end."""
    if isinstance(storage, Span):
        return storage.part(start, size)
    there = len(storage.data) if isinstance(storage, Held) else storage.size
    if start + size > there:
        raise Unreadable(f"a tensor reaches beyond its storage: {start + size} bytes of {there}")
    if size == there:
        return storage
    return Held(memoryview(storage.data)[start : start + size]) if isinstance(storage, Held) else Cut(storage, start, size)


def _with_gaps(taken: Stream, width: int, dims: Dims) -> tuple[Stream, str]:
    if _overlap(dims):
        return taken, "a view whose rows overlap: each value counted once"
    if not isinstance(taken, Span) or math.prod(n for n, _ in split_longest(dims)[0]) > _ROWS:
        return taken, "a view with gaps: the values between were counted too"
    return _blocks(taken, width, dims), ""


def _overlap(dims: Dims) -> bool:
    """Whether a row reaches into the next one, taken over all the smaller dimensions together."""
    return any(stride < sum((n - 1) * s for n, s in dims[i + 1 :]) + 1 for i, (_, stride) in enumerate(dims))


def _blocks(taken: Span, width: int, dims: Dims) -> Stream:
    """Divide the dimensions into those read at once and those looped over; one may be divided itself."""
    inside = 0
    while inside < len(dims) and _reach(dims[len(dims) - inside - 1 :]) * width <= _BLOCK:
        inside += 1
    outer, inner = dims[: len(dims) - inside], dims[len(dims) - inside :]
    if not outer:
        return Picked(taken, width, 0, (), inner)
    (size, stride), outer = outer[-1], outer[:-1]
    step = max(1, _BLOCK // (stride * width))
    many, rest = divmod(size, step)
    parts = [Picked(taken, width, 0, (*outer, (many, stride * step)), ((step, stride), *inner))] if many else []
    parts += [Picked(taken, width, many * step * stride, outer, ((rest, stride), *inner))] if rest else []
    return Chain(tuple(parts))


def _reach(dims: Dims) -> int:
    return sum((n - 1) * s for n, s in dims) + 1
