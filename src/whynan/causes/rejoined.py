"""Two calls that belong together and may stand far apart: a diff can seldom be given, but a replay can put them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whynan.causes.logspace import from_exponents, log_of, log_of_total, of_exponents, of_one
from whynan.causes.made import PICKS, Made, maker, without_zeros

if TYPE_CHECKING:
    from whynan.causes.source import Change, Expression

KINDS = ("log directly", "log of exp", "variance by hand", "scale first")


class Rejoined:
    """A computation made straight from what an argument was made of, however many lines lie between, and how it is written where a replay made it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._exponents: list[int] = []  # of how many exponents each logarithm was made

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute what a call computes, or say that it is not such a call."""
        import torch

        name = getattr(func, "__name__", "").strip("_")
        exponents: list[Any] = []
        made = _KINDS[self.kind](torch, name, args, exponents) if args else None
        if made is None:
            return NotImplemented
        self._exponents.append(len(exponents))
        return made

    def written(self, places: list[Expression | None]) -> list[tuple[Expression, Change]]:
        """Return the texts of the change at the places where the replay made it; nothing where one of them cannot be written."""
        if self.kind != "log of exp" or not places or len(places) != len(self._exponents):
            return []
        found: dict[object, tuple[Expression, Change]] = {}
        for expression, count in zip(places, self._exponents, strict=True):
            change = (of_one(expression) if count == 0 else of_exponents(expression, count)) if expression is not None else None
            if expression is None or change is None:
                return []
            found[expression.file, id(expression.code), expression.node.lineno, expression.node.col_offset] = expression, change
        return list(found.values())


def _log_directly(torch: Any, name: str, args: tuple[Any, ...], _: list[Any]) -> Any:
    return _log_of(torch, args[0], name) if name in ("log", "log1p") else None


def _log_of_exponentials(torch: Any, name: str, args: tuple[Any, ...], exponents: list[Any]) -> Any:
    return _log_of_exp(torch, args[0], name, exponents) if name in ("log", "log1p") else None


def _variance(torch: Any, name: str, args: tuple[Any, ...], _: list[Any]) -> Any:
    """Compute mean(x²) - mean(x)² as the variance: it cannot cancel below 0."""
    if name not in ("sub", "isub") or len(args) < 2:
        return None
    of_squares, squared = maker(args[0], "mean"), maker(args[1], "pow", "square", "mul")
    inner = maker(of_squares.args[0], "pow", "square", "mul") if of_squares is not None else None
    mean = maker(squared.args[0], "mean") if squared is not None else None
    if of_squares is None or inner is None or mean is None or inner.args[0] is not mean.args[0]:
        return None
    return torch.var(inner.args[0], dim=of_squares.dim, correction=0, keepdim=of_squares.keepdim)


def _scaled_first(torch: Any, name: str, args: tuple[Any, ...], _: list[Any]) -> Any:
    """Compute (a @ b) / c as (a / c) @ b: the product then fits."""
    if name not in ("div", "truediv", "mul") or len(args) < 2 or not isinstance(args[1], int | float):
        return None
    product = maker(args[0], "matmul", "bmm", "mm")
    factor = 1 / args[1] if name != "mul" else args[1]
    return torch.matmul(product.args[0] * factor, product.args[1]) if product is not None and abs(factor) < 1 else None


_KINDS: dict[str, Callable[[Any, str, tuple[Any, ...], list[Any]], Any]] = {
    "log directly": _log_directly,
    "log of exp": _log_of_exponentials,
    "variance by hand": _variance,
    "scale first": _scaled_first,
}


def _log_of(torch: Any, value: Any, name: str) -> Any:
    """Compute log(p) or log(1 - p) from the argument of the softmax or sigmoid that p was picked from."""
    made = maker(without_zeros(value))
    if made is None:
        return None
    if name == "log1p":
        return _log_of_rest(torch, made.args[0]) if made.name == "neg" else None
    if made.name in ("softmax", "sigmoid"):
        return log_of(made)
    if made.name in ("rsub", "sub") and any(isinstance(a, int | float) and a == 1 for a in (made.args[0], made.args[-1])):
        taken = [a for a in made.args if isinstance(a, torch.Tensor)]
        return _log_of_rest(torch, taken[0]) if len(taken) == 1 and (made.name == "rsub" or taken[0] is made.args[1]) else None
    return _picked(made, lambda source: _log_of(torch, source, name))


def _log_of_rest(torch: Any, value: Any) -> Any:
    """Compute log(1 - p) of a sigmoid."""
    made = maker(value)
    if made is not None and made.name == "sigmoid":
        return torch.nn.functional.logsigmoid(-made.args[0])
    return None if made is None else _picked(made, lambda source: _log_of_rest(torch, source))


def _picked(made: Made, of_source: Callable[[Any], Any]) -> Any:
    """Pick from the logarithms what was picked from the values."""
    inner = of_source(made.args[0]) if made.name in PICKS else None
    return None if inner is None else made.func(inner, *made.args[1:], **made.kwargs)


def _log_of_exp(torch: Any, value: Any, name: str, exponents: list[Any]) -> Any:
    """Compute log(1 + exp(x)), log(1 - exp(x)), log(sum(exp(x))), log(mean(exp(x))) or log(cosh(x)) from x; others from their exponents, which are noted."""
    made = maker(value)
    if made is None:
        return None
    if made.name == "exp" and name == "log1p":
        return torch.nn.functional.softplus(made.args[0])
    if made.name == "cosh" and name == "log":
        return made.args[0].abs() + torch.nn.functional.softplus(-2 * made.args[0].abs()) - 0.6931471805599453
    inner = next((m for m in (maker(a, "exp") for a in made.args) if m is not None), None) if name == "log" else None
    if inner is None:
        return from_exponents(value, exponents) if name == "log" else None
    if made.name in ("add", "radd") and any(isinstance(a, int | float) and a == 1 for a in made.args):
        return torch.nn.functional.softplus(inner.args[0])
    if made.name == "rsub" and isinstance(made.args[-1], int | float) and made.args[-1] == 1:
        return torch.log(-torch.expm1(inner.args[0]))
    return log_of_total(made, inner.args[0]) if made.name in ("sum", "mean") else from_exponents(value, exponents)
