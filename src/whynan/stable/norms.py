"""Vectors brought to length one, to root mean square one, and their cosine: right for every length the dtype can hold.

The plain forms square the entries: in float32 a vector of 1e20 has the length inf, one of 1e-25 the length 0. Here a row is first multiplied by
a power of two where it is very long or very short, which changes no bit of the others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import threshold

from whynan.stable.applying import apply, finish, readable

_HALF = (torch.float16, torch.bfloat16)
# beyond 2**far and below 2**-far a row is scaled by 2**-by or 2**by: then no square and no sum of squares leaves the dtype
_SCALING = {torch.float32: (40, 90), torch.float64: (400, 650)}


def normalize(x: Tensor, dim: int = -1) -> Tensor:
    """Return the vectors along `dim` brought to length 1; a vector of zeros stays zero.

    The plain form, `x / x.norm(dim, keepdim=True)`, is 0 / 0 for a vector of zeros, 0 for one so long that its square overflows, and
    inf or wrong where the square underflows. `F.normalize` has the gradient 1e12 at zero, where its eps takes over.
    At the edge: zeros give zeros and gradient 0. So does the gradient of a vector shorter than 2.9e-39, whose slope is no number of float32; its
    value is still of length 1. NaN and inf are not hidden.
    Elsewhere: the value of the plain form to the last bit, 4 ulps from the true one; the gradient within 4 eps of the largest incoming gradient over the
    length. bfloat16 and float16 are computed in float32 and rounded once. A gradient too large for the dtype overflows, as in the plain form.

    >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e30, 4e30]], requires_grad=True)
    >>> normalize(x).detach()
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000],
            [0.6000, 0.8000]])

    Cost: 0.3 to 0.6 times the time of the plain form, 1.16 times for 64 x 64; where a row must be scaled two passes more in forward.
    """
    return _apply(x, dim, mean=False, eps=0.0)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, dim: int = -1) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps)` along `dim`, times `weight` where given.

    The plain form overflows in float16 from entries of 256 on and in float32 from 1.8e19 (the result is then 0, with no gradient); an eps of 1e-20 is 0
    in float16; eps added outside the root gives the slope 1 / eps = 1,000,000 at a row of zeros, inside it 1 / sqrt(eps) = 1,000.
    At the edge: a row of zeros gives zeros with the slope 1 / sqrt(eps). NaN and inf are not hidden. An eps that is 0 in the dtype of the
    computation is refused.
    Elsewhere: the value within 5 ulps of the plain form in float32 and 6 of the true one; the gradient within 6 eps of the largest incoming gradient over
    the root. bfloat16 and float16 are computed in float32 and rounded once at the end.

    >>> rms_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.8485, 1.1314],
            [0.0000, 0.0000]])

    Cost: 0.3 to 0.7 times the time of the plain form, 1.2 times for 64 x 64; where a row must be scaled two passes more in forward.
    """
    if not eps >= torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).tiny:
        raise ValueError(f"eps is {eps:g}: it must be a positive number that is not lost in float32, for example 1e-6")
    y = _apply(x, dim, mean=True, eps=eps)
    if weight is None:
        return y
    return y * weight.reshape([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())])


def cosine_similarity(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """Return the cosine of the angle between the vectors along `dim`; 0 where one of them is zero.

    The plain form, `(a * b).sum(dim) / (a.norm(dim) * b.norm(dim))`, is 0 / 0 for a vector of zeros and loses very long and very short ones;
    `F.cosine_similarity` has the gradient 1e8 at zero, where its eps takes over.
    At the edge: value 0 and gradient 0. As with the plain form, rounding can give 1.0000001: `stable.acos` takes it.
    Elsewhere: the value within 2 ulps of 1 of the plain form and 3 of the true one; the gradient within 4 eps of the incoming gradient over the length of
    the vector. bfloat16 and float16 are computed in float32 and rounded once.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> cosine_similarity(a, torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
    tensor([0.7071, 0.0000])

    Cost: 0.3 to 1.04 times the time of the plain form; where a vector is zero, very long or very short, and on a device, 1.3 to 2 times.
    """
    kind = torch.promote_types(a.dtype, b.dtype)
    wide = torch.float32 if kind in _HALF else kind
    a, b = a.to(wide), b.to(wide)
    roots = _ordinary_roots(a, dim, up=True), _ordinary_roots(b, dim, up=True)
    if a.shape == b.shape and roots[0] is not None and roots[1] is not None:
        return apply(Cosine, a, b, *roots, dim).to(kind)  # type: ignore[no-any-return]
    return (normalize(a, dim) * normalize(b, dim)).sum(dim).to(kind)


class Cosine(Function):
    """The plain cosine of vectors of ordinary length, with fewer passes in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, root_a: Tensor, root_b: Tensor, dim: int) -> Tensor:  # type: ignore[override]
        return (a * b).sum(dim) / (root_a * root_b).squeeze(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(*inputs[:4], output)
        ctx.dim = inputs[4]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        a, b, root_a, root_b, cosine = ctx.saved_tensors
        if torch.is_grad_enabled():  # the roots came in without their graph
            root_a, root_b = (torch.linalg.vector_norm(x, 2, ctx.dim, keepdim=True) for x in (a, b))
        grad, along = grad.unsqueeze(ctx.dim), (grad * cosine).unsqueeze(ctx.dim)
        both = grad / (root_a * root_b)
        for_a = torch.addcmul(b * both, a, along / root_a.square(), value=-1)
        for_b = torch.addcmul(a * both, b, along / root_b.square(), value=-1)
        return for_a, for_b, None, None, None


def _apply(x: Tensor, dim: int, *, mean: bool, eps: float) -> Tensor:
    wide = x.float() if x.dtype in _HALF else x
    return apply(OverRoot, wide, dim, mean, eps)[0].to(x.dtype)  # type: ignore[no-any-return]


class OverRoot(Function):
    """`x` over the root of its sum of squares, or of their mean plus eps, and the reciprocal of that root.

    The reciprocal is an output, so that the backward pass, which uses it, can be differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, mean: bool, eps: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        root = _ordinary_roots(x, dim, up=not eps)
        if root is not None:
            root = (root.square() / x.shape[dim] + eps).sqrt_() if mean else root
            return x / root, root.reciprocal()
        scale = _scale(x.abs().amax(dim, keepdim=True), up=not eps)
        y = x * scale
        root = torch.linalg.vector_norm(y, 2, dim, keepdim=True)
        if mean:
            root = (root.square() / x.shape[dim] + eps * scale.square()).sqrt_()
        root = threshold(root, 0.0, math.inf)
        inverse = scale / root
        return finish(y, "div", root), finish(inverse, "masked_fill", inverse == math.inf, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, bool, float], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[override]
        ctx.save_for_backward(*output)
        ctx.dim = inputs[1]
        ctx.parts = inputs[0].shape[inputs[1]] if inputs[2] else 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inverse: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        y, inverse = ctx.saved_tensors
        along = (grad * y).sum(ctx.dim, keepdim=True) + grad_inverse * inverse
        along = along if ctx.parts == 1 else along / ctx.parts
        return torch.addcmul(grad, y, along, value=-1) * inverse, None, None, None


def _ordinary_roots(x: Tensor, dim: int, *, up: bool) -> Tensor | None:
    """The lengths, where they may be looked at and none is so long, or, with `up`, so short that a row must be scaled."""
    if not readable(x):
        return None
    roots = torch.linalg.vector_norm(x.detach(), 2, dim, keepdim=True)
    far, _ = _SCALING[x.dtype]
    shortest, longest = roots.aminmax()
    ordinary = longest.item() <= 2.0**far and (not up or shortest.item() >= 2.0**-far)
    return roots if ordinary else None


def _scale(largest: Tensor, *, up: bool) -> Tensor:
    """The power of two for each row; 1 for all but the extremes."""
    far, by = _SCALING[largest.dtype]
    scale = torch.where(largest > 2.0**far, 2.0**-by, torch.ones_like(largest))
    return torch.where(largest < 2.0**-far, 2.0**by, scale) if up else scale
