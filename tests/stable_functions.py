"""The functions of `whynan.stable`, each beside its plain form, and numbers over the whole range of a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whynan import stable

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF, torch.float64)


@dataclass(frozen=True, slots=True)
class Pair:
    """A function and its plain form, called with tensors only."""

    name: str
    plain: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    inputs: int = 1
    positive: bool = False  # arguments between 0 and 1

    def __str__(self) -> str:
        return self.name

    def arguments(self, dtype: torch.dtype = torch.float32, rows: int = 6, width: int = 8) -> list[Tensor]:
        torch.manual_seed(0)
        draw = torch.rand if self.positive else torch.randn
        return [(draw(rows, width) * 0.9 + 0.05 * self.positive).to(dtype) for _ in range(self.inputs)]


MASK = torch.arange(8) < torch.tensor([[8], [3], [1], [5], [7], [2]])
PRIOR = torch.full((8,), 1 / 8)


def plain_information(x: Tensor, y: Tensor) -> Tensor:
    return ((x.softmax(-1) * y.softmax(-1)).pow(0.6) / PRIOR.to(x)).sum(-1).log()


def plain_fraction(x: Tensor, y: Tensor) -> Tensor:
    return (y - x).square().sum() / (y - y.mean(0, keepdim=True)).square().sum()


def plain_sinkhorn(x: Tensor) -> Tensor:
    k = x.exp()
    for _ in range(20):
        k = k / k.sum(-1, keepdim=True)
        k = k / k.sum(-2, keepdim=True)
    return k


ELEMENTWISE = [
    Pair("sqrt", torch.sqrt, stable.sqrt, positive=True),
    Pair("log", torch.log, stable.log, positive=True),
    Pair("div", torch.div, stable.div, inputs=2),
    Pair("pow 0.6", lambda x: torch.pow(x, 0.6), lambda x: stable.pow(x, 0.6), positive=True),
    Pair("pow 2.5", lambda x: torch.pow(x, 2.5), lambda x: stable.pow(x, 2.5), positive=True),
    Pair("pow -0.5", lambda x: torch.pow(x, -0.5), lambda x: stable.pow(x, -0.5), positive=True),
    Pair("pow 3", lambda x: torch.pow(x, 3), lambda x: stable.pow(x, 3)),
    Pair("pow -2", lambda x: torch.pow(x, -2), lambda x: stable.pow(x, -2)),
    Pair("acos", torch.acos, stable.acos, positive=True),
    Pair("asin", torch.asin, stable.asin, positive=True),
]
ROWS = [
    Pair("masked_softmax", lambda x: x.masked_fill(~MASK.to(x.device), -math.inf).softmax(-1), lambda x: stable.masked_softmax(x, MASK.to(x.device))),
    Pair("masked_mean", lambda x: (x * MASK.to(x.device)).sum(-1) / MASK.to(x.device).sum(-1), lambda x: stable.masked_mean(x, MASK.to(x.device), -1)),
    Pair("normalize", lambda x: x / x.norm(dim=-1, keepdim=True), stable.normalize),
    Pair("rms_norm", lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), stable.rms_norm),
    Pair("cosine_similarity", lambda x, y: (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)), stable.cosine_similarity, inputs=2),
    Pair("fraction_of_variance_unexplained", plain_fraction, stable.fraction_of_variance_unexplained, inputs=2),
    Pair("beta_mutual_information", plain_information, lambda x, y: stable.beta_mutual_information(x, y, PRIOR.to(x)), inputs=2),
    Pair("sinkhorn", plain_sinkhorn, stable.sinkhorn),
]
ALL = ELEMENTWISE + ROWS


def whole_range(dtype: torch.dtype, count: int = 2000) -> Tensor:
    """Every kind of finite number: all exponents from the smallest denormal to the largest number, both signs, and the neighbours of 0, 1 and the limits."""
    torch.manual_seed(1)
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    low, high = math.log2(smallest), math.log2(limits.max)
    spread = torch.exp2(torch.linspace(low, high, count, dtype=torch.float64) - 1e-9)
    spread = torch.where(torch.rand(count) < 0.5, -spread, spread)
    one = 1.0
    special = [0.0, smallest, limits.tiny, limits.max, one, one - limits.eps / 2, one - limits.eps, one + limits.eps, 0.5, 2.0**-128, 2.0**-16]
    both = torch.tensor([s * v for v in special for s in (1, -1)], dtype=torch.float64)
    inside = torch.rand(count, dtype=torch.float64) * 2 - 1
    numbers = torch.cat([spread, both, inside]).to(dtype)
    return numbers[numbers.isfinite()]


def ulp(of: Tensor, dtype: torch.dtype) -> Tensor:
    """The step from one number of the dtype to the next, at each number."""
    limits = torch.finfo(dtype)
    size = of.double().abs().clamp_min(limits.smallest_normal)
    return torch.exp2(size.log2().floor()) * limits.eps


def uneven(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with uneven gradients from 0.5 to 1: the sum of a softmax has none."""

    def form(*inputs: Tensor) -> Tensor:
        out = function(*inputs)
        draw = torch.rand(out.shape, generator=torch.Generator().manual_seed(5)) / 2 + 0.5
        return out * draw.to(torch.bfloat16).to(out)

    return form


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    gradients = torch.autograd.grad(value.sum() if value.dim() else value, leaves, allow_unused=True)
    return value.detach(), [g if g is not None else torch.zeros_like(x) for g, x in zip(gradients, leaves, strict=True)]
