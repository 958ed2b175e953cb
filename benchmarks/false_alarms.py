"""How often the spike watch speaks on healthy curves, and what it finds when something is put into them.

    python benchmarks/false_alarms.py              # three seeds, 1000 steps each: a few minutes on one core
    python benchmarks/false_alarms.py --steps 200  # a quick look

Every flagged step counts as an alarm, also the second of two in a row. A value put in is so many times the largest of
the 17 values before it.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from healthy_curves import FIRST, SECOND, Trainer
from held_out_curves import HELD_OUT
from more_curves import THIRD

from whynan.tripwire.early import LEAST
from whynan.tripwire.spikes import SpikeWatch

GROUPS = {"first": FIRST, "second": SECOND, "third": THIRD, "held out": HELD_OUT}
PLACES = (4, 20, 50, 100, 300, 600, 900)
Curve = tuple[str, list[float]]  # what it is of, and its values
FACTORS = (3.0, 10.0, 100.0, 1e4)


@dataclass(slots=True)
class Row:
    """What one kind of training gave."""

    kind: str
    steps: int = 0
    loss: int = 0
    norm: int = 0
    curves: list[Curve] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Alarms of both curves per 10 000 steps."""
        return 1e4 * (self.loss + self.norm) / max(self.steps, 1)

    def line(self) -> str:
        """Return the row of the table."""
        return f"| {self.kind} | {self.steps} | {self.loss} | {self.norm} | {self.rate:.1f} |"


def alarms(name: str, values: Iterable[float]) -> int:
    """Count the flagged steps of a curve."""
    watch = SpikeWatch(LEAST[name])
    return sum(watch.see(step, value) is not None for step, value in enumerate(values))


def measure(kind: str, trainer: Trainer, seeds: int, steps: int) -> Row:
    """Train with every seed and watch both curves."""
    row = Row(kind)
    for seed in range(seeds):
        losses, norms = (list(curve) for curve in zip(*islice(trainer(seed), steps), strict=True))
        row.steps += len(losses)
        row.loss += alarms("loss", losses)
        row.norm += alarms("gradient norm", norms)
        row.curves += [("loss", losses), ("gradient norm", norms)]
    return row


def total(kind: str, rows: list[Row]) -> Row:
    """Add rows up."""
    curves = [c for row in rows for c in row.curves]
    return Row(f"**{kind}**", sum(r.steps for r in rows), sum(r.loss for r in rows), sum(r.norm for r in rows), curves)


def found(curves: list[Curve], name: str, place: int, spike: float | None, factor: float = 1.0) -> tuple[int, int]:
    """Put one value in at a place of every curve of a name; return how many were flagged, of how many."""
    hits = tried = 0
    for _, values in (c for c in curves if c[0] == name and len(c[1]) > place):
        watch = SpikeWatch(LEAST[name])
        for step, value in enumerate(values[:place]):
            watch.see(step, value)
        tried += 1
        largest = max(map(abs, values[max(0, place - 17) : place]))
        hits += watch.see(place, factor * largest if spike is None else spike) is not None
    return hits, tried


def detection(curves: list[Curve]) -> Iterator[str]:
    """Yield the table of what was found: rows are what was put in, columns are places."""
    yield "| put in | curve | " + " | ".join(f"step {p}" for p in PLACES) + " |"
    yield "|---|---|" + "---:|" * len(PLACES)
    injected = [(f"{f:g} times", None, f) for f in FACTORS] + [("4.5e12", 4.5e12, 1.0)]
    for label, spike, factor in injected:
        for name in LEAST:
            cells = (found(curves, name, place, spike, factor) for place in PLACES)
            yield f"| {label} | {name} | " + " | ".join(f"{h} of {n}" if n else "-" for h, n in cells) + " |"


def microseconds(curves: list[Curve]) -> float:
    """Return the time of one number, in microseconds."""
    start = time.perf_counter()
    for name, values in curves:
        alarms(name, values)
    return 1e6 * (time.perf_counter() - start) / sum(len(values) for _, values in curves)


def main() -> None:
    """Train, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.seeds} seeds of {options.steps} steps\n")
    print("| training | steps | alarms: loss | alarms: gradient norm | per 10 000 steps |\n|---|---:|---:|---:|---:|")
    everything: list[Row] = []
    for group, trainers in GROUPS.items():
        rows = []
        for kind, trainer in trainers.items():
            rows.append(measure(kind, trainer, options.seeds, options.steps))
            print(rows[-1].line(), flush=True)
        everything.append(total(group, rows))
        print(everything[-1].line())
    whole = total("all", everything)
    print(whole.line() + "\n")
    print("\n".join(detection(whole.curves)))
    print(f"\n{microseconds(whole.curves):.1f} microseconds for one number")


if __name__ == "__main__":
    main()
