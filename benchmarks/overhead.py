"""What watching costs while nothing is wrong, beside the usual ways to look for NaN, in one run.

    python benchmarks/overhead.py                  # CPU: a step of three milliseconds
    python benchmarks/overhead.py --device cuda    # GPT-2 124M and 350M, bf16 autocast, fused AdamW

Each line is the median time of a step over that of an unwatched step, measured in alternating blocks of the same
process. Ratios only: absolute times say more about the machine than about the tool.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import whynan
from whynan.recovery.lastgood import Everything, LastGood


class Block(nn.Module):
    """A GPT-2 block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Bench:
    """One model with its optimizer and a step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]
    sync: Callable[[], None]


def gpt(name: str, layers: int, width: int, heads: int, batch: int, length: int, clip: bool) -> Bench:
    """GPT-2 in bf16 autocast with fused AdamW on the GPU."""
    torch.manual_seed(0)
    model = GPT(layers, width, heads, 50304, length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 50304, (batch, length + 1), device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Bench(f"{name}{' + clip' if clip else ''}", model, optimizer, step, torch.cuda.synchronize)


def mlp(clip: bool) -> Bench:
    """A step of three milliseconds on this CPU: the batch is chosen for it."""
    batch = 64
    for _ in range(4):
        bench = mlp_of(batch, clip)
        for _ in range(20):
            bench.step()
        taken = min(block(bench, plain, 30) for _ in range(3)) * 1000
        if 2.8 < taken < 3.2:
            break
        batch = max(8, round(batch * 3 / taken))
    print(f"  a step of {taken:.1f} ms: {batch} rows", file=sys.stderr, flush=True)
    return bench


def mlp_of(batch: int, clip: bool) -> Bench:
    """A small network on the CPU, with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch, 256), torch.randint(0, 10, (batch,))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Bench(f"MLP 0.4M{' + clip' if clip else ''}", model, optimizer, step, lambda: None)


@contextlib.contextmanager
def plain(bench: Bench) -> Iterator[Callable[[], Any]]:
    """Nothing."""
    yield bench.step


@contextlib.contextmanager
def watched(bench: Bench) -> Iterator[Callable[[], Any]]:
    """What whynan.watch costs."""
    with whynan.watch(bench.model, bench.optimizer, files=False):
        yield bench.step


@contextlib.contextmanager
def anomaly(bench: Bench) -> Iterator[Callable[[], Any]]:
    """Anomaly mode: torch.autograd.detect_anomaly."""
    with torch.autograd.set_detect_anomaly(True):
        yield bench.step


@contextlib.contextmanager
def read_loss(bench: Bench) -> Iterator[Callable[[], Any]]:
    """The loss read by the host every step."""
    yield lambda: torch.isfinite(bench.step()).item()


@contextlib.contextmanager
def by_hand(bench: Bench) -> Iterator[Callable[[], Any]]:
    """By hand: isnan(p.grad).any() for every parameter."""
    original = bench.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if any(torch.isnan(p.grad).any() for p in bench.model.parameters() if p.grad is not None):
            return None
        return original(*args, **kwargs)

    bench.optimizer.step = step  # type: ignore[method-assign]
    try:
        yield bench.step
    finally:
        del bench.optimizer.step


@contextlib.contextmanager
def forward_hooks(bench: Bench) -> Iterator[Callable[[], Any]]:
    """Forward hooks that look at isfinite(output).all()."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
            raise RuntimeError("not finite")

    handles = [m.register_forward_hook(hook) for m in bench.model.modules()]
    try:
        yield bench.step
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def underflow_overflow(bench: Bench) -> Iterator[Callable[[], Any]]:
    """DebugUnderflowOverflow of transformers."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with contextlib.redirect_stdout(None):
        DebugUnderflowOverflow(bench.model)
        try:
            yield bench.step
        finally:
            for module in bench.model.modules():
                module._forward_hooks.clear()


TOOLS = {
    "unwatched, again": plain,
    "whynan.watch": watched,
    "loss read by the host": read_loss,
    "isnan(p.grad) by hand": by_hand,
    "forward hooks, isfinite": forward_hooks,
    "torch anomaly mode": anomaly,
    "DebugUnderflowOverflow": underflow_overflow,
}


def block(bench: Bench, tool: Any, steps: int) -> float:
    """Time some steps under a tool, after two to warm up; return the median of a step."""
    with tool(bench) as step:
        for _ in range(2):
            step()
        bench.sync()
        times = [time.perf_counter()]
        for _ in range(steps):
            step()
            times.append(time.perf_counter())
        bench.sync()
        if bench.sync is torch.cuda.synchronize:  # no sync inside the block: what counts is how long a run of steps takes
            return (time.perf_counter() - times[0]) / steps
    return statistics.median(b - a for a, b in pairwise(times))


def measure(bench: Bench, rounds: int, steps: int, tools: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return ratio and spread for each tool, in alternating blocks."""
    found: dict[str, list[float]] = {name: [] for name in tools}
    for _ in range(3):
        bench.step()
    for _ in range(rounds):
        for name, tool in tools.items():
            before = block(bench, plain, steps)
            under = block(bench, tool, steps)
            after = block(bench, plain, steps)
            found[name].append(under / ((before + after) / 2))
    return {name: (statistics.median(r), max(r) - min(r)) for name, r in found.items()}


def snapshots(bench: Bench, rounds: int) -> list[str]:
    """Say what a snapshot of the last good state costs, in step times, and how rare it must be to stay below 1%."""
    usual = min(block(bench, plain, 10) for _ in range(rounds))
    lines = []
    for where in ("device", "host"):
        state = Everything([bench.optimizer], [bench.model])
        taken = []
        for _ in range(rounds + 1):
            bench.sync()
            begin = time.perf_counter()
            kept = LastGood(state, 0, where == "host")
            bench.sync()
            taken.append(time.perf_counter() - begin)
        cost = statistics.median(taken[1:]) / usual  # the first allocates
        size = kept.nbytes / 1e9
        lines.append(f"| {bench.name} | {where} | {size:.2f} GB | {cost:.2f} steps | every {max(1, math.ceil(cost * 100))} updates |")
        del kept
    return lines


def available() -> dict[str, Any]:
    """Return the tools that can run here."""
    tools = dict(TOOLS)
    try:
        import transformers.debug_utils  # noqa: F401 (only to see whether it is there)
    except ImportError:
        del tools["DebugUnderflowOverflow"]
        print("transformers is not installed: DebugUnderflowOverflow left out", file=sys.stderr)
    return tools


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=["124M", "350M"], help="only this size, on the GPU")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tools", nargs="*", help="only tools whose name contains one of these")
    arguments = parser.parse_args()
    tools = {n: t for n, t in available().items() if not arguments.tools or any(word in n for word in arguments.tools)}
    if arguments.device == "cuda":
        machine = torch.cuda.get_device_name()
        makers = [
            lambda: gpt("GPT-2 124M", 12, 768, 12, 16, 1024, True),
            lambda: gpt("GPT-2 124M", 12, 768, 12, 16, 1024, False),
            lambda: gpt("GPT-2 350M", 24, 1024, 16, 8, 1024, True),
            lambda: gpt("GPT-2 350M", 24, 1024, 16, 8, 1024, False),
        ]
        if arguments.size:
            makers = makers[:2] if arguments.size == "124M" else makers[2:]
        steps = arguments.steps or 20
    else:
        machine = platform.machine()
        torch.set_num_threads(1)
        makers = [lambda: mlp(True), lambda: mlp(False)]
        steps = arguments.steps or 60
    print(f"torch {torch.__version__}, {machine}, python {platform.python_version()}; time of a step over an unwatched one")
    columns: list[tuple[str, dict[str, tuple[float, float]]]] = []
    kept: list[str] = []
    for make in makers:
        bench = make()
        columns.append((bench.name, measure(bench, arguments.rounds, steps, tools)))
        kept += snapshots(bench, arguments.rounds)
        print(f"  measured {bench.name}", file=sys.stderr, flush=True)
        del bench
    print("| tool | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name in tools:
        cells = [f"{found[name][0]:.3f} ±{found[name][1] / 2:.3f}" for _, found in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| snapshot for a rollback | kept on | memory | costs | below 1% |\n|---|---|---|---|---|")
    print("\n".join(kept))


if __name__ == "__main__":
    main()
