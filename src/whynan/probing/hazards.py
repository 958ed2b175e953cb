"""How far each hazardous operation of a step is from its unsafe region, differentiable.

The autograd graph of the loss knows every operation with its saved operands, those inside torch's own composite
functions too. A saved operand is still part of the graph, so the distance can be followed back to inputs and weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_NAME = re.compile(r"Backward\d*$")


@dataclass(frozen=True, slots=True)
class Hazard:
    """One operation with the operand that can leave its domain."""

    operation: str
    number: int  # among the hazards of a step, in the order they were met
    aim: torch.Tensor  # elementwise; the smaller, the nearer to the unsafe region; monotone and without plateau
    root: torch.Tensor | None = None  # elementwise; zero is the unsafe value, for a Newton step

    def nearest(self) -> torch.Tensor:
        """Return the aim of the nearest element."""
        return _finite_min(self.aim)

    def value(self) -> float:
        """Return the nearest element's aim as a number."""
        return float(self.nearest().detach())


def _finite_min(values: torch.Tensor) -> torch.Tensor:
    flat = values.flatten()
    usable = torch.where(torch.isfinite(flat.detach()), flat.detach(), torch.full_like(flat.detach(), math.inf))
    return flat[usable.argmin()]


Aims = Iterator[tuple[torch.Tensor, torch.Tensor | None]]
_TINY = 1e-44


def _log(x: torch.Tensor) -> torch.Tensor:
    return torch.log(x.abs().double() + _TINY)


def _to_zero(x: torch.Tensor) -> Aims:
    yield _log(x), x


def _to_one(x: torch.Tensor) -> Aims:
    edge = 1 - x.abs()
    yield torch.where(edge.detach() > 0, _log(edge), edge.double()), edge


def _to_overflow(result: torch.Tensor) -> Aims:
    limit = math.log(torch.finfo(result.dtype).max) if result.is_floating_point() else 0.0
    yield limit - _log(result), None


def _saved(node: Any, name: str) -> torch.Tensor | None:
    try:
        found = getattr(node, f"_saved_{name}")
    except (AttributeError, RuntimeError):  # freed, or changed in place since
        return None
    usable = isinstance(found, torch.Tensor) and found.numel() and found.is_floating_point() and found.layout is torch.strided
    return found if usable else None


def _operand(name: str, rule: Callable[[torch.Tensor], Aims]) -> Callable[[Any], Aims]:
    def aims(node: Any) -> Aims:
        found = _saved(node, name)
        if found is not None:
            yield from rule(found)

    return aims


def _pow(node: Any) -> Aims:
    base, exponent = _saved(node, "self"), getattr(node, "_saved_exponent", None)
    if base is not None and isinstance(exponent, float | int):
        if exponent < 1:
            yield from _to_zero(base)
        else:
            yield from _to_overflow(base * base.detach().abs().clamp(1.0, 1e18))
    elif base is not None:
        yield from _to_zero(base)


def _div(node: Any) -> Aims:
    other, top = _saved(node, "other"), _saved(node, "self")
    if other is not None:
        yield from _to_zero(other)
        if top is not None and top.requires_grad:
            yield -_log(top), None


def _norm(node: Any) -> Aims:
    result = _saved(node, "result")
    if result is not None:
        yield _log(result), None


def _spread(node: Any) -> Aims:
    """Standard deviations and variances: no spread along the reduced dimensions."""
    source = _saved(node, "self")
    if source is None:
        return
    dim = getattr(node, "_saved_dim", None)
    dims = [int(d) if d < 1 << 63 else int(d) - (1 << 64) for d in dim] if dim else list(range(source.dim()))
    yield _log((source - source.mean(dims, keepdim=True)).square().mean(dims)), None


def _product(node: Any) -> Aims:
    for name in ("self", "other", "mat1", "mat2", "vec"):
        found = _saved(node, name)
        if found is not None and found.requires_grad:
            yield -_log(found), None


def _solve(node: Any) -> Aims:
    """Decompositions and inverses: the smallest pivot."""
    for name in ("A", "self", "LU", "L", "result", "inverse"):
        found = _saved(node, name)
        if found is not None and found.dim() >= 2 and found.shape[-1] == found.shape[-2]:
            _, log = torch.linalg.slogdet(found.double())
            yield -log if name == "inverse" else log, None
            return


def _softmax(node: Any) -> Aims:
    result = _saved(node, "result")
    if result is not None:
        if float(result.detach().min()) < 0:  # of a log softmax
            yield result.double(), None
        else:
            yield _log(result), None
            yield _log(1 - result), None


_TABLE: dict[str, Callable[[Any], Aims]] = {
    **dict.fromkeys(("Log", "Log2", "Log10", "Xlogy", "Digamma", "Lgamma"), _operand("self", _to_zero)),
    "Log1P": _operand("self", lambda x: _to_zero(1 + x)),
    "Sqrt": _operand("result", lambda y: iter([(_log(y), y.square())])),
    "Rsqrt": _operand("result", lambda y: iter([(-_log(y), y.pow(-2))])),
    "Reciprocal": _operand("result", lambda y: iter([(-_log(y), 1 / y)])),
    **dict.fromkeys(("Exp", "Expm1", "Exp2", "Cosh", "Sinh", "Logsumexp", "Cumprod", "Prod"), _operand("result", _to_overflow)),
    **dict.fromkeys(("Acos", "Asin", "Atanh", "Erfinv"), _operand("self", _to_one)),
    "Acosh": _operand("self", lambda x: _to_zero(x - 1)),
    "Atan2": _norm,
    "Logit": _operand("self", lambda x: iter([(_log(x), x), (_log(1 - x), 1 - x)])),
    "Pow": _pow,
    "Div": _div,
    **dict.fromkeys(("LinalgVectorNorm", "Norm", "Cdist", "EuclideanDist", "PairwiseDistance"), _norm),
    **dict.fromkeys(("Std", "Var", "StdMean", "VarMean"), _spread),
    **dict.fromkeys(("Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Mv"), _product),
    **dict.fromkeys(("LinalgSolveEx", "LinalgInvEx", "LinalgCholeskyEx", "LinalgDet", "LinalgSlogdet", "LinalgEigh", "LinalgSvd"), _solve),
    **dict.fromkeys(("Softmax", "Sigmoid", "LogSoftmax"), _softmax),
}


def hazards(loss: torch.Tensor, limit: int = 400) -> list[Hazard]:
    """Return the hazardous operations in the graph of a loss, in the order they were made.

    >>> x = torch.tensor([2.0, 0.5], requires_grad=True)
    >>> [h.operation for h in hazards((x.log() / x.norm()).sum())]
    ['Log', 'LinalgVectorNorm', 'Div', 'Div']
    """
    found: list[Hazard] = []
    for node in sorted(_nodes(loss, limit * 10), key=lambda n: int(n._sequence_nr())):
        operation = _NAME.sub("", node.name())
        rule = _TABLE.get(operation)
        if rule is None:
            continue
        with torch.enable_grad():
            try:
                aims = [(a, r) for a, r in rule(node) if a.numel()]
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue
        found += [Hazard(operation, len(found) + i, aim, root) for i, (aim, root) in enumerate(aims)]
        if len(found) >= limit:
            break
    return found


def _nodes(loss: torch.Tensor, limit: int) -> list[Any]:
    seen: dict[Any, None] = {}
    todo = [loss.grad_fn]
    while todo and len(seen) < limit:
        node = todo.pop()
        if node is None or node in seen or "AccumulateGrad" in node.name():
            continue
        seen[node] = None
        todo += [after for after, _ in node.next_functions]
    return list(seen)
