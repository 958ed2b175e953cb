"""What changed between two checkpoints: per tensor the norm of the change over the norm of what was, streaming."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.checkpoints.contents import Contents, Entry, Stream
from whynan.forensics.checkpoints.roles import Role, role_of
from whynan.forensics.data.tables import need
from whynan.forensics.findings import Change, Comparison
from whynan.forensics.wishes import Wishes
from whynan.records import number

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 22  # bytes of one tensor held at a time
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SHOWN = 3
_JUMP = 4.0  # times the usual update of the pairs before


def compare(newer: Place, older: Place, wishes: Wishes) -> Comparison:
    """Compare two checkpoints tensor by tensor, matched by name.

    Cost: both files are read once; a few MiB of each are held.
    """
    from whynan.forensics.checkpoints.opening import open_checkpoint

    try:
        need("torch", "comparing checkpoints")
        return compare_contents(str(newer), open_checkpoint(newer), str(older), open_checkpoint(older), wishes)
    except Unreadable as why:
        return Comparison(str(newer), str(older), (), unreadable=str(why))


def compare_contents(path: str, newer: Contents, against: str, older: Contents, wishes: Wishes) -> Comparison:
    """Compare two checkpoints that were opened."""
    new, old = _matched(_by_name(newer), _by_name(older))
    changes = [_change(entry, old[name], wishes) for name, entry in new.items() if name in old and role_of(name) is not Role.ASIDE]
    changes.sort(key=lambda c: -1.0 if c.ratio is None else c.ratio, reverse=True)
    return Comparison(path, against, tuple(changes), tuple(n for n in new if n not in old), tuple(n for n in old if n not in new))


def _by_name(contents: Contents) -> dict[str, Entry]:
    """Entries by their names, without what wrappers add to them."""
    return {".".join(p for p in e.name.split(".") if p not in _WRAPPERS): e for e in contents.entries}


def _matched(new: dict[str, Entry], old: dict[str, Entry]) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Take the names as they are, or without their first word on one side, whichever has more in common."""
    ways = [(new, old), (_without_first(new), old), (new, _without_first(old))]
    return max(ways, key=lambda way: len(way[0].keys() & way[1].keys()))


def _without_first(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Without the one word before all names (`state_dict.`, `model.`), where there is one."""
    first = {name.split(".", 1)[0] for name in entries}
    return {name.split(".", 1)[1] if len(first) == 1 and "." in name else name: e for name, e in entries.items()}


def _change(new: Entry, old: Entry, wishes: Wishes) -> Change:
    notes = []
    if new.dtype != old.dtype:
        notes.append(f"dtype {old.dtype} to {new.dtype}")
    if new.shape != old.shape:
        return Change(new.name, note=", ".join([f"shape {list(old.shape)} to {list(new.shape)}", *notes]))
    if _torch_dtype(new.dtype) is None or _torch_dtype(old.dtype) is None:
        return Change(new.name, note=", ".join([*notes, "not compared: no arithmetic on this dtype"]))
    if new.layout != old.layout:
        return Change(new.name, note=", ".join([*notes, "not compared: it lies in memory in another order"]))
    sums = _Sums()
    for a, b in zip_longest(_numbers(new, wishes), _numbers(old, wishes)):
        if a is None or b is None or len(a) != len(b):
            return Change(new.name, note=", ".join([*notes, "not compared: one of the two is a view that repeats its values"]))
        sums.add(a, b)
    if sums.skipped:
        notes.append(f"{sums.skipped} values that are not finite left out")
    return Change(new.name, sums.ratio, sums.largest, ", ".join(notes))


@dataclass(slots=True)
class _Sums:
    """Norms of one tensor as its pieces come in."""

    change: float = 0.0
    before: float = 0.0
    largest: float = 0.0
    skipped: int = 0

    def add(self, new: torch.Tensor, old: torch.Tensor) -> None:
        import torch

        change = new - old
        if not bool(torch.isfinite(change.sum())):
            usable = torch.isfinite(new) & torch.isfinite(old)
            self.skipped += int((~usable).sum())
            change, old = change[usable], old[usable]
        if change.numel():
            self.change += float(change.square().sum())
            self.before += float(old.square().sum())
            self.largest = max(self.largest, float(change.abs().max()))

    @property
    def ratio(self) -> float | None:
        """None where there was nothing to change from."""
        if self.before:
            return math.sqrt(self.change / self.before)
        return None if self.change else 0.0


def _torch_dtype(name: str) -> torch.dtype | None:
    import torch

    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and not name.startswith(("q", "bits")) and name not in ("float4_e2m1fn_x2", "float8_e8m0fnu") else None


def _numbers(entry: Entry, wishes: Wishes) -> Iterator[torch.Tensor]:
    """Yield a tensor in pieces of the same number of values whatever its dtype, in float64."""
    import torch

    dtype = _torch_dtype(entry.dtype)
    assert dtype is not None
    for piece in pieces(entry.stream, _PIECE // 16 * dtype.itemsize):
        wishes.tick(len(piece))
        values = torch.frombuffer(piece, dtype=dtype)
        yield (torch.view_as_real(values).flatten() if dtype.is_complex else values).to(torch.float64)


def pieces(stream: Stream, size: int) -> Iterator[bytearray]:
    """Cut a stream into pieces of one size, the last one as long as what is left; the memory of a piece is used again.

    >>> [bytes(p) for p in pieces(lambda: iter([memoryview(b"abc"), memoryview(b"defgh")]), 4)]
    [b'abcd', b'efgh']
    """
    held, filled = bytearray(size), 0
    for view in stream():
        raw = view.cast("B") if view.nbytes else view
        start = 0
        while start < len(raw):
            taken = min(size - filled, len(raw) - start)
            held[filled : filled + taken] = raw[start : start + taken]
            filled, start = filled + taken, start + taken
            if filled == size:
                yield held
                filled = 0
    if filled:
        yield held[:filled]


def where_growth_began(comparisons: Sequence[Comparison]) -> list[str]:
    """Say from which pair on the updates of a tensor were far above what they had been.

    >>> pair = lambda a, b, r: Comparison(b, a, (Change("w", r, r),))
    >>> where_growth_began([pair("1", "2", 0.01), pair("2", "3", 0.01), pair("3", "4", 0.2)])
    ['w: updates grew from 4 on: 0.2 of its norm, 0.01 before']
    """
    series: dict[str, list[tuple[Comparison, float]]] = {}
    for pair in comparisons:
        for change in pair.changes:
            if change.ratio is not None and role_of(change.name) is Role.WEIGHT:
                series.setdefault(change.name, []).append((pair, change.ratio))
    jumps = [(jump, name) for name, points in series.items() if (jump := _jump(points)) is not None]
    order = {id(pair): i for i, pair in enumerate(comparisons)}
    jumps.sort(key=lambda item: (order[id(item[0][0])], -item[0][1]))
    return [
        f"{name}: updates grew from {pair.path.rstrip('/').rsplit('/', 1)[-1]} on: {number(ratio)} of its norm, {number(usual)} before"
        for (pair, ratio, usual), name in jumps[:_SHOWN]
    ]


def _jump(points: Sequence[tuple[Comparison, float]]) -> tuple[Comparison, float, float] | None:
    for i in range(2, len(points)):
        usual = sorted(r for _, r in points[:i])[i // 2]
        if usual > 0 and points[i][1] > _JUMP * usual:
            return *points[i], usual
    return None
