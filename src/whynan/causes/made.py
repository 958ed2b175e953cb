"""What the values of a replay were made of: the calls of interest, by the tensor that each returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whynan.causes.source import positioned

PICKS = frozenset(
    {"gather", "getitem", "select", "index_select", "take_along_dim", "squeeze", "unsqueeze", "view", "reshape", "flatten", "transpose", "permute",
     "diagonal", "contiguous", "masked_select", "narrow", "expand", "t", "swapaxes", "movedim"}
)  # fmt: skip
_ARITHMETIC = frozenset(
    {"softmax", "sigmoid", "pow", "square", "sum", "prod", "mul", "exp", "add", "cosh", "radd", "sub", "rsub", "rmul", "log", "neg", "mean", "matmul", "bmm",
     "mm", "div", "truediv"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """One call that was kept."""

    result: Any
    name: str  # without underscores: mul for __mul__
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    func: Any

    @property
    def dim(self) -> Any:
        """Over what a reduction went."""
        return self.args[1] if len(self.args) > 1 else self.kwargs.get("dim", self.kwargs.get("axis"))

    @property
    def keepdim(self) -> bool:
        """Whether a reduction kept its dimension."""
        return bool(self.args[2] if len(self.args) > 2 else self.kwargs.get("keepdim", False))


_made: dict[int, Made] = {}


def remember(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Keep what a call of interest was made with."""
    name = getattr(func, "__name__", "").strip("_")
    if name in _ARITHMETIC or name in PICKS:
        args, kwargs = positioned(args, kwargs)
        _made[id(result)] = Made(result, name, args, kwargs, func)


def forget() -> None:
    """Drop everything kept of the last replay."""
    _made.clear()


def maker(value: Any, *names: str) -> Made | None:
    """Return the call that made a value in this replay, if it is one of these names, or of any."""
    found = _made.get(id(value))
    return found if found is not None and found.result is value and (not names or found.name in names) else None


def without_zeros(value: Any) -> Any:
    """Return what a 0 was added to, where a value is that: `gamma + p` is p while gamma is 0."""
    while (added := maker(value, "add", "radd")) is not None and len(added.args) == 2:
        kept = [place for place, term in enumerate(added.args) if not _is_zero(term)]
        if len(kept) != 1 or getattr(added.args[kept[0]], "shape", None) != value.shape:
            break
        value = added.args[kept[0]]
    return value


def _is_zero(term: Any) -> bool:
    return bool((term == 0).all()) if hasattr(term, "numel") else isinstance(term, int | float) and term == 0
