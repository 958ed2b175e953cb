"""A row or a column of the batch that lies far outside all others: said where something overflows, for it is mostly the reason. No torch import."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whynan.causes.handed import batch_size
from whynan.errors import let_through
from whynan.records import number, short_dtype

if TYPE_CHECKING:
    import torch

    from whynan.capsule.replay import Program
    from whynan.causes.catalogue import Scene
    from whynan.causes.swapping import Put

CODES = ("WN101", "WN201", "WN202", "WN203", "WN303", "WN503")  # causes of values that grow too large, or too near to an edge
FAR = 30  # how many times the usual largest value of a row
FEWEST = 4  # rows or columns, below which none is an exception
_SHARE = 4  # at most one of so many is an exception
_CUTS = ("getitem", "narrow")
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Extreme:
    """Rows or columns of a tensor that the step was given, all of whose like are much smaller."""

    value: float
    low: float  # of all others
    high: float
    places: list[int]
    kind: str  # row | column
    shape: tuple[int, ...]
    dtype: str
    whole: torch.Tensor  # what was handed in; a part of it, where the step cut its batch out of it

    @property
    def words(self) -> str:
        """Say it in one line.

        >>> Extreme(-99999.0, -4.1, 3.8, [3], "row", (8, 6), "torch.float32", None).words
        'input: row 3 of f32[8, 6] holds -99999; the values of the other rows lie between -4.1 and 3.8'
        """
        named = ", ".join(map(str, self.places[:_NAMED])) + " …" * (len(self.places) > _NAMED)
        kind, holds = (f"{self.kind}s", "hold up to") if len(self.places) > 1 else (self.kind, "holds")
        shape = f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"
        rest = f"the values of the other {self.kind}s lie between {number(self.low)} and {number(self.high)}"
        return f"input: {kind} {named} of {shape} {holds} {number(self.value)}; {rest}"


def extreme_input(scene: Scene, code: str) -> Extreme | None:
    """Return what of the batch lies far outside the rest and outside of what the kept healthy steps were given, where the cause is one of size.

    Cost: a forward pass and a few reductions of each tensor that was handed in, in the failing step alone, and in healthy ones where there is something.
    """
    if code not in CODES or scene.jump is not None or scene.birth is None:
        return None
    try:
        found = [each for data, whole in _handed(scene.program) for each in [_exception(data, whole)] if each is not None]
        best = max(found, key=lambda each: abs(each.value), default=None)
        return None if best is None or any(_as_large(program, best) for program in scene.healthy.values()) else best
    except Exception as error:  # a note is not worth a diagnosis
        let_through(error)
        return None


def _as_large(program: Program, best: Extreme) -> bool:
    """Whether a healthy step was given values of that size as well."""
    usual = [data for data, _ in _handed(program) if data.dim() == len(best.shape) and data.numel()]
    return any(float(data.abs().amax()) >= abs(best.value) / FAR for data in usual)


def _handed(program: Program) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the numbers that calls were handed from outside and models without a gradient, weights apart: as cut for the step, and whole."""
    from whynan.capsule.tape.entries import Outside, Slot

    def value(argument: Any) -> Any:
        return argument.value().detach() if isinstance(argument, Outside) else argument

    made = program.results()
    for entry in program.entries:
        for read in {id(read): read for read in entry.reads}.values():
            tensor = read.tensor if isinstance(read, Outside) else made.get(read) if isinstance(read, Slot) and entry.runs_model else None
            if tensor is None or tensor.requires_grad or id(tensor) in program.weights or not _is_plain(tensor):
                continue
            whole = value(read) if isinstance(read, Outside) else tensor
            cut = isinstance(read, Outside) and getattr(entry.fn, "__name__", "").strip("_") in _CUTS and len(entry.reads) == 1
            yield (entry.fn(*map(value, entry.args), **entry.kwargs) if cut else whole), whole


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_sparse and not tensor.is_nested and not tensor.is_meta


def _exception(data: torch.Tensor, whole: torch.Tensor) -> Extreme | None:
    """Return the rows, else the columns, of a tensor that are far larger than the others."""
    if data.dim() == 0 or not data.numel() or not bool(data.isfinite().all()):
        return None
    rows = data.abs().flatten(1).amax(1) if data.dim() > 1 else data.abs()
    columns = data.abs().amax(0) if data.dim() == 2 else rows[:0]
    for kind, sizes, by in (("row", rows, data), ("column", columns, data.T if data.dim() == 2 else data)):
        usual = float(sizes.float().median()) if len(sizes) >= FEWEST else 0.0
        far = sizes > FAR * usual
        if usual > 0 and far.any() and _SHARE * int(far.sum()) <= len(sizes):
            among, rest = by[far], by[~far]
            value = float(among.flatten()[among.abs().argmax()])
            if abs(value) <= FAR * float(rest.abs().max()) or not math.isfinite(value):
                continue
            places = [int(i) for i in far.nonzero()[:, 0]]
            return Extreme(value, float(rest.min()), float(rest.max()), places, kind, tuple(data.shape), str(data.dtype), whole)
    return None


def left_out(scene: Scene, found: Extreme) -> tuple[list[int], Put | None]:
    """Return the rows to leave out, and the change of cuts that does so where the step cut its batch out of something larger."""
    from whynan.causes.fixes import plain_name
    from whynan.causes.swapping import Put

    rows = found.places if found.kind == "row" else []
    if not rows or found.whole.shape == found.shape:
        return (rows if found.shape[0] == batch_size(scene.program) else []), None
    size = len(found.whole)

    def swap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        if plain_name(func) not in _CUTS or not isinstance(args[0], torch.Tensor) or args[0].dim() == 0 or len(args[0]) != size:
            return NotImplemented
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.shape[:1] != found.shape[:1]:
            return NotImplemented
        keep = [i for i in range(len(result)) if i not in set(rows)]
        return result[keep]

    return rows, Put(swap, None)
