"""What the functions of `whynan.stable` cost, over the plain form: forward and backward, on one thread.

    python benchmarks/stable.py
    python benchmarks/stable.py --dtype bfloat16
    python benchmarks/stable.py --edges                one entry in 100, one row in 64 at the edge
    python benchmarks/stable.py --device cuda          with a size that fills the device
    python benchmarks/stable.py --only sqrt --rounds 200
    python benchmarks/stable.py --compile              both forms through torch.compile

Rounds of the two forms are interleaved, so that a busy machine hurts both; the ratio is that of the fastest tenth, the middle one of three
measurements, and beside it the lowest and the highest. "in use" is the function where it is usually called (the root of a sum of squares);
"bare" is the function alone on a large tensor, where each pass over the memory shows.
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
LIMIT = 1.3


@dataclass(frozen=True, slots=True)
class Case:
    """One function beside its plain form, on one set of inputs."""

    name: str
    use: str
    plain: Form
    ours: Form
    inputs: tuple[Tensor, ...]


def elementwise(rows: int, width: int, edges: bool) -> Iterator[Case]:
    """Yield roots, logarithms, quotients, powers and arcs."""
    x, y = (1 - torch.rand(rows, width) for _ in range(2))  # above 0
    vectors = x.clone()
    if edges:
        x.view(-1)[::100], y.view(-1)[::100], vectors[::64] = 0, 0, 0
    arcs = 1 - x if edges else x * 0.99
    yield Case("sqrt", "in use", lambda x: x.square().sum(-1).sqrt(), lambda x: stable.sqrt(x.square().sum(-1)), (vectors,))
    yield Case("sqrt", "bare", torch.sqrt, stable.sqrt, (x,))
    yield Case("log", "in use", lambda x: -(x * x.softmax(-1).log()).sum(-1), lambda x: -(x * stable.log(x.softmax(-1))).sum(-1), (x,))
    yield Case("log", "bare", torch.log, stable.log, (x,))
    yield Case("div", "in use", lambda x: x / x.sum(-1, keepdim=True), lambda x: stable.div(x, x.sum(-1, keepdim=True)), (vectors,))
    yield Case("div", "bare", torch.div, stable.div, (x, y))
    yield Case("div", "signs", torch.div, stable.div, (x, y * torch.where(torch.rand_like(y) < 0.5, -1.0, 1.0)))
    yield Case("pow", "bare", lambda x: torch.pow(x, 0.6), lambda x: stable.pow(x, 0.6), (x,))
    yield Case("acos", "bare", torch.acos, stable.acos, (arcs,))
    yield Case("asin", "bare", torch.asin, stable.asin, (arcs,))


def over_rows(rows: int, width: int, edges: bool) -> Iterator[Case]:
    """Yield masks and norms."""
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1))  # padding
    if edges:
        x[::64], mask[::64] = 0, False
    there: dict[str, Tensor] = {}

    def at(x: Tensor) -> Tensor:
        """The mask, where the input is."""
        if str(x.device) not in there:
            there[str(x.device)] = mask.to(x.device)
        return there[str(x.device)]

    yield Case("masked_softmax", "", lambda x: x.masked_fill(~at(x), -math.inf).softmax(-1), lambda x: stable.masked_softmax(x, at(x)), (x,))
    yield Case("masked_mean", "", lambda x: (x * at(x)).sum(-1) / at(x).sum(-1), lambda x: stable.masked_mean(x, at(x), -1), (x,))
    yield Case("normalize", "", lambda x: x / x.norm(dim=-1, keepdim=True), stable.normalize, (x,))
    yield Case("rms_norm", "", lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), stable.rms_norm, (x,))
    yield Case("cosine_similarity", "", lambda x, y: (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)), stable.cosine_similarity, (x, y))
    yield Case("fraction_of_variance_unexplained", "", plain_fraction, stable.fraction_of_variance_unexplained, (x, y[:1].expand_as(y).clone() if edges else y))
    prior = torch.rand(width).softmax(-1)
    ours: Form = lambda x, y: stable.beta_mutual_information(x, y, prior.to(x))  # noqa: E731
    yield Case("beta_mutual_information", "", lambda x, y: plain_information(x, y, prior.to(x)), ours, (x, y))


def others(rows: int, width: int, edges: bool) -> Iterator[Case]:
    """Yield what works on matrices, state or ids."""
    side = max(4, math.isqrt(width))
    yield Case("sinkhorn", f"{side} x {side}", plain_sinkhorn, stable.sinkhorn, (torch.randn(max(1, rows // 8), side, side),))
    x = torch.rand(rows, width)
    if edges:
        x[:, ::100] = math.nan
    plain, ours = averages(width)
    yield Case("MovingAverage", "in use", lambda x: prior_loss(x, plain), lambda x: prior_loss(x, ours), (x,))
    yield Case("MovingAverage", "bare", lambda x: plain(x.detach().mean(0)), lambda x: ours(x.detach().mean(0)), (x,))
    yield Case("tokens_to_rgb", "", plain_codec, stable.tokens_to_rgb, (torch.randint(0, 50257, (rows, width)),))


def averages(width: int) -> tuple[Form, Form]:
    """A moving average past its first hundred values: in place as it is written by hand, and ours; one of each per device."""
    by_hand: dict[torch.device, Tensor] = {}
    kept: dict[torch.device, stable.MovingAverage] = {}

    def plain(value: Tensor) -> Tensor:
        if value.device not in by_hand:
            by_hand[value.device] = torch.zeros(width, device=value.device)
        return by_hand[value.device].mul_(0.99).add_(value.detach(), alpha=0.01)

    def ours(value: Tensor) -> Tensor:
        if value.device not in kept:
            kept[value.device] = stable.MovingAverage(width).to(value.device)
            kept[value.device].accepted.fill_(200)
        result: Tensor = kept[value.device](value)
        return result

    return plain, ours


def prior_loss(logits: Tensor, average: Form) -> Tensor:
    """The information of soft assignments against their running prior: where the casebook's fourth case has its average."""
    shares = logits.softmax(-1)
    return (shares * (logits.log_softmax(-1) - average(shares.mean(0)).clamp_min(1e-6).log())).sum(-1)


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


def measure(forms: list[Form], inputs: tuple[Tensor, ...], rounds: int) -> tuple[float, float]:
    """Return microseconds of the plain form and of ours: the median of the fastest tenth of alternating rounds."""
    grad = torch.ones_like(forms[0](*inputs))
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 3):
        for index in (0, 1) if turn % 2 else (1, 0):
            took = once(forms[index], inputs, grad)
            if turn >= 3:
                times[index].append(took)
    plain, ours = (1e6 * statistics.median(sorted(t)[: max(1, len(t) // 10)]) for t in times)
    return plain, ours


def compare(case: Case, args: argparse.Namespace) -> float:
    """Print the line of one case and return its ratio."""
    wanted = getattr(torch, args.dtype)
    inputs = tuple(x.detach().to(args.device, wanted if x.is_floating_point() else x.dtype) for x in case.inputs)
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    forms: list[Form] = [torch.compile(form) if args.compile else form for form in (case.plain, case.ours)]
    runs = sorted((measure(forms, inputs, args.rounds) for _ in range(args.repeats)), key=lambda run: run[1] / run[0])
    (plain, ours), ratios = runs[len(runs) // 2], [run[1] / run[0] for run in runs]
    shape = "x".join(map(str, case.inputs[0].shape))
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"{case.name:34}{case.use:10}{shape:>14}{plain:12.0f}{ours:12.0f}{ours / plain:8.2f}   {spread}", flush=True)
    return ours / plain


def main() -> None:
    """Print one line for each function and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument("--only", default="")
    parser.add_argument("--edges", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = [(64, 64), (512, 512), (2048, 512)] + ([(16384, 4096)] if args.device != "cpu" else [])
    print(f"torch {torch.__version__}, {args.device}, {args.dtype}{', with edges' if args.edges else ''}")
    print(f"{'function':34}{'':10}{'inputs':>14}{'plain us':>12}{'stable us':>12}{'ratio':>8}   of {args.repeats}")
    cases = (case for rows, width in sizes for make in (elementwise, over_rows, others) for case in make(rows, width, args.edges))
    ratios = [compare(case, args) for case in cases if args.only in case.name]
    print(f"{sum(ratio <= LIMIT for ratio in ratios)} of {len(ratios)} within {LIMIT}, the highest {max(ratios):.2f}")


if __name__ == "__main__":
    main()
