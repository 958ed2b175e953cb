"""A long run with faults in it: memory should stay flat, and the training end where it would have ended without them.

    python benchmarks/soak.py                 # 20,000 steps, a fault in 1% of them
    python benchmarks/soak.py --steps 2000

The same small network is trained on the same stream of batches: watched with faults, unwatched without them, and
unwatched without them for several other seeds of the stream, which says how much the final loss moves by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import whynan

FAULTS = ("input", "target", "activation", "loss", "gradient")
PAGE = 4096


class Net(nn.Module):
    """A small network with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        """Run the layers; a bad pass divides by zero."""
        hidden = self.body(x)
        return self.head(hidden / torch.zeros_like(hidden) if bad else hidden)


@dataclass(slots=True)
class Reading:
    """Memory at one moment."""

    step: int
    resident: float  # MB
    tensors: int
    objects: int


@dataclass(slots=True)
class Soaked:
    """How a run ended."""

    loss: float
    readings: list[Reading] = field(default_factory=list)
    incidents: int = 0
    faults: int = 0
    seconds: float = 0.0


def batches(steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy samples of one smooth function."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        yield x, torch.sin(x[:, :4].sum(1, keepdim=True)) + 0.1 * torch.randn(32, 1, generator=generator)


def faults(steps: int, share: float) -> dict[int, str]:
    """Which steps go wrong, and how."""
    rng = random.Random(0)  # noqa: S311 (which steps go wrong is no secret)
    return {step: rng.choice(FAULTS) for step in range(steps) if rng.random() < share}


def read(step: int) -> Reading:
    """Look at the memory of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)  # isinstance asks some objects for their class, and they warn
    return Reading(step, resident, tensors, len(objects))


def train(steps: int, seed: int, bad: dict[int, str], looks: int = 0) -> Soaked:
    """Train once; `looks` readings of memory on the way."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    readings = []
    for step, (x, y) in enumerate(batches(steps, seed)):
        one_step(net, optimizer, x, y, bad.get(step, ""))
        schedule.step()
        if looks and (step + 1) % (steps // looks) == 0:
            readings.append(read(step + 1))
    return Soaked(evaluate(net), readings, faults=len(bad))


def one_step(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, fault: str) -> None:
    """One step, with its fault."""
    if fault in ("input", "target"):
        (x if fault == "input" else y)[0] = float("nan")
    optimizer.zero_grad()
    out = net(x, fault == "activation")
    loss = nn.functional.mse_loss(out, y)
    if fault == "loss":
        loss = loss + torch.log((out * 0).sum())
    if fault == "gradient":
        loss = loss + torch.sqrt((out * 0).square().sum())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def evaluate(net: Net) -> float:
    """Return the loss on samples that were not trained on."""
    net.eval()
    losses = [nn.functional.mse_loss(net(x), y).item() for x, y in batches(50, 10_000)]
    return statistics.mean(losses)


def watched(steps: int, share: float, looks: int = 10) -> Soaked:
    """Train with faults under `whynan.watch`."""
    bad = faults(steps, share)
    with contextlib.redirect_stderr(io.StringIO()), whynan.watch(files=False, in_a_row=20, in_total=steps) as guard:
        result = _timed(lambda: train(steps, 0, bad, looks))
    result.incidents = len(guard.incidents)
    return result


def _timed(run: Callable[[], Soaked]) -> Soaked:
    start = time.perf_counter()
    result = run()
    result.seconds = time.perf_counter() - start
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    soaked = watched(chosen.steps, chosen.share)
    print("| step | resident MB | tensors | objects |\n|---:|---:|---:|---:|")
    for r in soaked.readings:
        print(f"| {r.step} | {r.resident:.1f} | {r.tensors} | {r.objects} |")
    print(f"\n{soaked.faults} faults, {soaked.incidents} incidents in {chosen.steps} steps")
    plain = [train(chosen.steps, seed, {}).loss for seed in range(chosen.seeds)]
    spread = f"{statistics.mean(plain):.5f}, from {min(plain):.5f} to {max(plain):.5f}"
    print(f"final loss: with faults {soaked.loss:.5f}; without, same batches {plain[0]:.5f}; without, {chosen.seeds} streams {spread}")


if __name__ == "__main__":
    main()
