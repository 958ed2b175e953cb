"""What the functions of `whynan.stable` cost, over the plain form: forward and backward, on one thread.

    python benchmarks/stable.py
    python benchmarks/stable.py --device cuda
    python benchmarks/stable.py --only sqrt --rounds 200
    python benchmarks/stable.py --compile              both forms through torch.compile

Rounds of the two forms are interleaved, so that a busy machine hurts both; the ratio is that of the fastest tenth. "in use" is the function where it
is usually called (the root of a sum of squares); "bare" is the function alone on a large tensor, where each pass over the memory shows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whynan import stable

Form = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One function beside its plain form, on one set of inputs."""

    name: str
    use: str
    plain: Form
    ours: Form
    inputs: tuple[Tensor, ...]


def elementwise(rows: int, width: int) -> Iterator[Case]:
    """Yield roots, logarithms, quotients, powers and arcs."""
    x, y = torch.rand(rows, width), torch.rand(rows, width)
    yield Case("sqrt", "in use", lambda x: x.square().sum(-1).sqrt(), lambda x: stable.sqrt(x.square().sum(-1)), (x,))
    yield Case("sqrt", "bare", torch.sqrt, stable.sqrt, (x,))
    yield Case("log", "in use", lambda x: -(x * x.softmax(-1).log()).sum(-1), lambda x: -(x * stable.log(x.softmax(-1))).sum(-1), (x,))
    yield Case("log", "bare", torch.log, stable.log, (x,))
    yield Case("div", "in use", lambda x: x / x.sum(-1, keepdim=True), lambda x: stable.div(x, x.sum(-1, keepdim=True)), (x,))
    yield Case("div", "bare", torch.div, stable.div, (x, y))
    yield Case("pow", "bare", lambda x: torch.pow(x, 0.6), lambda x: stable.pow(x, 0.6), (x,))
    yield Case("acos", "bare", torch.acos, stable.acos, (x,))
    yield Case("asin", "bare", torch.asin, stable.asin, (x,))


def over_rows(rows: int, width: int) -> Iterator[Case]:
    """Yield masks and norms."""
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1))  # padding
    yield Case("masked_softmax", "", lambda x: x.masked_fill(~mask, -math.inf).softmax(-1), lambda x: stable.masked_softmax(x, mask), (x,))
    yield Case("masked_mean", "", lambda x: (x * mask).sum(-1) / mask.sum(-1), lambda x: stable.masked_mean(x, mask, -1), (x,))
    yield Case("normalize", "", lambda x: x / x.norm(dim=-1, keepdim=True), stable.normalize, (x,))
    yield Case("rms_norm", "", lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), stable.rms_norm, (x,))
    yield Case("cosine_similarity", "", lambda x, y: (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)), stable.cosine_similarity, (x, y))
    yield Case("fraction_of_variance_unexplained", "", plain_fraction, stable.fraction_of_variance_unexplained, (x, y))
    prior = torch.rand(width).softmax(-1)
    ours = lambda x, y: stable.beta_mutual_information(x, y, prior)  # noqa: E731
    yield Case("beta_mutual_information", "", lambda x, y: plain_information(x, y, prior), ours, (x, y))


def others(rows: int, width: int) -> Iterator[Case]:
    """Yield what works on matrices, state or ids."""
    side = max(4, math.isqrt(width))
    yield Case("sinkhorn", f"{side} x {side}", plain_sinkhorn, stable.sinkhorn, (torch.randn(max(1, rows // 8), side, side),))
    average, kept = torch.zeros(width), stable.MovingAverage(width)
    yield Case("MovingAverage", "", lambda x: average.mul_(0.99).add_(x.detach().mean(0), alpha=0.01), lambda x: kept(x.mean(0)), (torch.rand(rows, width),))
    ids = torch.randint(0, 50257, (rows, width))
    yield Case("tokens_to_rgb", "", plain_codec, stable.tokens_to_rgb, (ids,))


def plain_fraction(x: Tensor, y: Tensor) -> Tensor:
    """The loss of the casebook's first case."""
    return (y - x).square().sum() / (y - y.mean(0, keepdim=True)).square().sum()


def plain_information(x: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    """The loss of the casebook's fourth case."""
    return ((x.softmax(-1) * y.softmax(-1)).pow(0.6) / prior).sum(-1).log()


def plain_sinkhorn(x: Tensor) -> Tensor:
    """Sinkhorn's iteration on the exponentials."""
    k = x.exp()
    for _ in range(20):
        k = k / k.sum(-1, keepdim=True)
        k = k / k.sum(-2, keepdim=True)
    return k


def plain_codec(ids: Tensor) -> Tensor:
    """Three digits without a check."""
    return torch.stack((ids >> 16, ids >> 8 & 255, ids & 255), dim=-1).to(torch.uint8)


def once(form: Form, inputs: tuple[Tensor, ...], grad: Tensor) -> float:
    """Return the seconds of one forward and backward."""
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    out = form(*inputs)
    if out.requires_grad:
        out.backward(grad)
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(case: Case, rounds: int, device: str, compiled: bool) -> tuple[float, float]:
    """Return microseconds of the plain form and of ours: the median of the fastest tenth of alternating rounds."""
    inputs = tuple(x.to(device).requires_grad_(x.is_floating_point()) for x in case.inputs)
    forms = [torch.compile(form) if compiled else form for form in (case.plain, case.ours)]
    grad = torch.ones_like(case.plain(*inputs))
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 3):
        for index in (0, 1) if turn % 2 else (1, 0):
            took = once(forms[index], inputs, grad)
            if turn >= 3:
                times[index].append(took)
    plain, ours = (1e6 * statistics.median(sorted(t)[: max(1, len(t) // 10)]) for t in times)
    return plain, ours


def main() -> None:
    """Print one line for each function and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'function':34}{'':10}{'inputs':>14}{'plain us':>12}{'stable us':>12}{'ratio':>8}")
    for rows, width in ((64, 64), (512, 512), (2048, 512)):
        for make in (elementwise, over_rows, others):
            for case in make(rows, width):
                if args.only in case.name:
                    plain, ours = measure(case, args.rounds, args.device, args.compile)
                    shape = "x".join(map(str, case.inputs[0].shape))
                    print(f"{case.name:34}{case.use:10}{shape:>14}{plain:12.0f}{ours:12.0f}{ours / plain:8.2f}", flush=True)


if __name__ == "__main__":
    main()
