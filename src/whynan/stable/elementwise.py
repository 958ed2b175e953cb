"""Roots, logarithms, quotients and powers whose slope is finite at the edge of their domain.

Every function here is the one of torch, to the last bit, wherever value and slope of that are finite. At the edge the slope of the plain
function is infinite, and inf * 0 is NaN one node later. Here the slope at and beyond the edge is 0: the element is left out of the gradient.
Where it must stay alive, `max_slope` makes the function go on along its tangent from the point where the slope reaches that number.

NaN stays NaN and infinity stays infinity: a bad input is never hidden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import threshold

from whynan.stable.applying import all_above, all_beyond, apply, as_autocast, between, finish, readable
from whynan.stable.tangent import positive, with_tangent

# the largest number of a dtype whose reciprocal overflows
_NO_RECIPROCAL = {torch.float16: 2.0**-16, torch.bfloat16: 2.0**-128, torch.float32: 2.0**-128, torch.float64: 2.0**-1024}


def sqrt(x: Tensor, *, max_slope: float | None = None) -> Tensor:
    """Return the square root, with a finite slope at 0.

    The plain form, `torch.sqrt(x)`, has the slope inf at 0 and is NaN below 0 (a variance that rounding made negative).
    At the edge (x <= 0): value 0, slope 0. With `max_slope` m, below 1 / 4m² the tangent: slope m, and at 0 the value 1 / 4m.
    Elsewhere: value and gradient of `torch.sqrt`, to the last bit.

    >>> x = torch.tensor([4.0, 0.0, -1e-9], requires_grad=True)
    >>> sqrt(x)
    tensor([2., 0., 0.], grad_fn=<SqrtBackward>)
    >>> torch.autograd.grad(sqrt(x).sum(), x)
    (tensor([0.2500, 0.0000, 0.0000]),)

    Cost: on the CPU one reduction where no entry is at the edge, 1.05 to 1.26 times the time of the plain form; else, and on a device, one pass more
    in forward and one in backward, and the host does not wait.
    """
    if max_slope is None:
        x = as_autocast(x)
        return torch.sqrt(x) if all_above(x, 0.0) else apply(Sqrt, x)  # type: ignore[no-any-return]
    return with_tangent(torch.sqrt, x, 0.25 / positive(max_slope) ** 2, math.inf, max_slope)


class Sqrt(Function):
    """The square root that divides by infinity where the root is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return finish(x.relu(), "sqrt")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (root,) = ctx.saved_tensors
        return grad / threshold(2 * root, 0.0, math.inf, inplace=not torch.is_grad_enabled())


def log(x: Tensor, *, max_slope: float | None = None) -> Tensor:
    """Return the natural logarithm, finite at and below 0.

    The plain form, `torch.log(x)`, is -inf at 0 with slope inf, and NaN below.
    At the edge (x so small that 1 / x is no number of the dtype: below 2.9e-39 in float32 and bfloat16, below 1.5e-5 in float16): the value
    at that limit (-88.7 in float32, -11.1 in float16), slope 0. With `max_slope` m, below 1 / m the tangent: slope m, at 0 the value
    -log(m) - 1: a probability of 0 still learns. Elsewhere: value and gradient of `torch.log`, to the last bit.

    For the logarithm of a softmax or a sigmoid use `log_softmax` and `logsigmoid`, which have no edge.

    >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> log(x)
    tensor([  0.0000, -88.7228], grad_fn=<LogBackward0>)
    >>> torch.autograd.grad(log(x).sum(), x)
    (tensor([1., 0.]),)
    >>> torch.autograd.grad(log(x, max_slope=1e6).sum(), x)
    (tensor([1.0000e+00, 1.0000e+06]),)

    Cost: on the CPU one reduction where no entry is at the edge, 1.08 to 1.27 times the time of the plain form; else one pass more in forward and
    one in backward.
    """
    if max_slope is not None:
        return with_tangent(torch.log, x, 1 / positive(max_slope), math.inf, max_slope)
    edge = _NO_RECIPROCAL[x.dtype]
    return torch.log(x if all_above(x, edge) else threshold(x, edge, edge))


def div(numerator: Tensor | float, denominator: Tensor, *, least: float = 0.0) -> Tensor:
    """Return the quotient, and 0 where the denominator is 0.

    The plain form, `a / b`, is inf or NaN at b = 0, and both gradients with it.
    At the edge (|b| <= `least`): value 0, both gradients 0, the graph is kept; the element is left out. A numerator that is not finite gives
    NaN there. Elsewhere: value and gradients of `a / b`, to the last bit. What is too large for the dtype still overflows to inf: raise
    `least` to the smallest denominator that means anything.

    >>> a, b = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([4.0, 0.0, 0.0], requires_grad=True)
    >>> div(a, b)
    tensor([0.2500, 0.0000, 0.0000], grad_fn=<DivBackward0>)
    >>> torch.autograd.grad(div(a, b).sum(), b)
    (tensor([-0.0625, -0.0000, -0.0000]),)

    Cost: on the CPU one reduction where no entry is at the edge, 1.05 to 1.28 times the time of the plain form; else three passes over the
    denominator in forward, none in backward.
    """
    if not least >= 0:
        raise ValueError(f"least must be 0 or more, got {least}")
    if least and all_beyond(denominator, least):
        return numerator / denominator
    if not least and readable(denominator):
        quotient: Tensor = numerator / denominator
        if quotient.is_cpu and type(quotient) is Tensor and between(quotient):
            return quotient
    return numerator / apply(ZeroToInf, denominator, float(least))  # type: ignore[no-any-return]


class ZeroToInf(Function):
    """Infinity in place of a denominator at or below a limit.

    The gradient that the quotient sends to an infinite denominator is 0 already: it is passed on as it is.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(denominator: Tensor, least: float) -> Tensor:  # type: ignore[override]
        far = threshold(denominator.abs(), least, math.inf, inplace=not torch.compiler.is_compiling())  # where() is ten times slower on a CPU
        return finish(far, "copysign", denominator)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # type: ignore[override]
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def pow(base: Tensor, exponent: float, *, max_slope: float | None = None) -> Tensor:
    """Return `base ** exponent` for one number as exponent, with a finite slope at 0.

    The plain form has the slope inf at 0 for exponents between 0 and 1, is inf at 0 for negative ones, and NaN below 0 for fractions.
    At the edge (base <= 0; only base = 0 for a whole exponent): value 0, slope 0. With `max_slope` (exponents between 0 and 1), from the
    point where the slope reaches it the tangent: a small positive value at 0, slope `max_slope`. Elsewhere, and for whole exponents from 0
    on: value and gradient of `torch.pow`, to the last bit. What is too large for the dtype still overflows to inf.

    A power of a product of probabilities belongs into log space: see `beta_mutual_information`.

    >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> torch.autograd.grad(pow(x, 0.6).sum(), x)
    (tensor([0.6000, 0.0000]),)

    Cost: on the CPU one reduction where no entry is at the edge, 1.04 to 1.17 times the time of the plain form; else one pass more in forward.
    """
    if isinstance(exponent, Tensor):
        raise TypeError("the exponent of stable.pow is one number, not a tensor: for a learned exponent compute (exponent * stable.log(base)).exp()")
    if max_slope is not None:
        if not 0 < exponent < 1:
            raise ValueError(f"max_slope is for exponents between 0 and 1, got {exponent}: the slope of the others has no such limit")
        return with_tangent(lambda x: torch.pow(x, exponent), base, (positive(max_slope) / exponent) ** (1 / (exponent - 1)), math.inf, max_slope)
    whole = float(exponent).is_integer()
    if whole:
        plain = exponent >= 0 or all_beyond(base, 0.0)
        return torch.pow(base if plain else apply(ZeroToInf, base, 0.0), exponent)
    base = as_autocast(base)
    return torch.pow(base, exponent) if all_above(base, 0.0) else apply(Pow, base, float(exponent))  # type: ignore[no-any-return]


class Pow(Function):
    """A power with a fraction as exponent; infinity in place of 0 where the power of that is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(base: Tensor, exponent: float) -> Tensor:  # type: ignore[override]
        return finish(_base_for(base, exponent), "pow", exponent)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(inputs[0])
        ctx.exponent = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (base,) = ctx.saved_tensors
        slope = _base_for(base, ctx.exponent - 1)
        if torch.is_grad_enabled():
            return grad * (ctx.exponent * slope.pow(ctx.exponent - 1)), None
        return slope.pow_(ctx.exponent - 1).mul_(ctx.exponent) * grad, None


def _base_for(base: Tensor, exponent: float) -> Tensor:
    return threshold(base, 0.0, math.inf if exponent < 0 else 0.0)
