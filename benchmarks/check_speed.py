"""How fast `whynan check` looks at a checkpoint, beside plain reading and the usual one-liner, on the same file in the page cache.

    python benchmarks/check_speed.py --size 2
    python benchmarks/check_speed.py --memory 20     the memory of one check of a file of 20 GB; the file is sparse and takes no disk

Rounds are interleaved, so that a busy machine hurts all three; the best of each is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def write(path: Path, dtype: str, size: int) -> None:
    """Write a state dict of 16 tensors of normal numbers, with as many zeros as a biased model has."""
    import torch

    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    state = {}
    for i in range(16):
        tensor = torch.randn(size // 16 // width // 1024, 1024).mul_(0.02).to(getattr(torch, dtype))
        state[f"layer.{i}.weight"] = tensor
    torch.save(state, path)


def plain_read(path: Path) -> None:
    """Read the file in pieces of 16 MiB through one reused buffer."""
    _read(path, 16 << 20)


def cached_read(path: Path) -> None:
    """Read the file in pieces that stay in the cache of a core: the fastest there is."""
    _read(path, 1 << 20)


def _read(path: Path, piece: int) -> None:
    buffer = memoryview(bytearray(piece))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def one_liner(path: Path) -> None:
    """The check people write by hand."""
    import torch

    all(not torch.isnan(t).any() for t in torch.load(path).values())


def one_liner_widened(path: Path) -> None:
    """The same for float8, which has no isnan."""
    import torch

    all(not torch.isnan(t.float()).any() for t in torch.load(path).values())


def checker(jobs: int) -> Callable[[Path], None]:
    """A check with so many threads."""
    from whynan.forensics.addresses import Place
    from whynan.forensics.checkpoints.opening import open_checkpoint
    from whynan.forensics.checkpoints.scan import scan
    from whynan.forensics.wishes import Wishes

    def check(path: Path) -> None:
        scan(open_checkpoint(Place.of(path)), Wishes(jobs=jobs))

    return check


def rate(work: Callable[[Path], None], path: Path) -> float:
    """GiB a second."""
    start = time.perf_counter()
    work(path)
    return path.stat().st_size / GIB / (time.perf_counter() - start)


def compare(dtype: str, size: int, jobs: int, rounds: int, folder: Path) -> None:
    """Print one line of the table."""
    path = folder / f"{dtype}.pt"
    write(path, dtype, size)
    hand = one_liner_widened if dtype.startswith("float8") else one_liner
    works = [plain_read, cached_read, checker(1), checker(jobs), hand]
    rates: list[list[float]] = [[] for _ in works]
    plain_read(path)
    for i in range(rounds):
        for work, seen in zip(works, rates, strict=True):
            if work is not hand or i < 2:
                seen.append(rate(work, path))
    path.unlink()
    plain, cached, single, several, by_hand = (max(r) for r in rates)
    print(
        f"{dtype:14} {plain:8.2f} {cached:8.2f} {by_hand:10.2f} {single:8.2f} {several:8.2f} | {single / plain:7.0%} {several / plain:7.0%} "
        f"| {single / cached:7.0%} {several / cached:7.0%} | {single / by_hand:7.1f} {several / by_hand:7.1f}",
        flush=True,
    )


def sparse_file(path: Path, size: int) -> None:
    """A safetensors file of zeros that takes no disk."""
    count = size // (1 << 28)
    header = {f"layer.{i}.weight": {"dtype": "BF16", "shape": [1 << 27], "data_offsets": [i << 28, (i + 1) << 28]} for i in range(count)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + (count << 28))


def memory(size: int, jobs: int, folder: Path) -> None:
    """Print what a check of a large file adds to the resident memory of the process."""
    path = folder / "large.safetensors"
    sparse_file(path, size)
    check = checker(jobs)
    small = folder / "small.safetensors"
    sparse_file(small, 1 << 28)
    before = resident()
    peak = Watch()
    start = time.perf_counter()
    check(path)
    took = time.perf_counter() - start
    print(f"{path.stat().st_size / 1e9:.1f} GB in {took:.1f} s ({path.stat().st_size / GIB / took:.2f} GiB/s), jobs {jobs}: ", end="")
    print(f"resident {before / 1e6:.0f} MB before, {peak.stop() / 1e6:.0f} MB at most, {(peak.most - before) / 1e6:.0f} MB more")


class Watch:
    """Looks at the resident memory a hundred times a second."""

    def __init__(self) -> None:
        self.most = resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.most = max(self.most, resident())

    def stop(self) -> int:
        self._end.set()
        self._thread.join()
        return self.most


def resident() -> int:
    """Bytes of memory the process has now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=float, default=2, help="GiB of each file")
    parser.add_argument("--memory", type=float, default=0, help="GB of a sparse file whose check is measured for memory")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.memory:
            memory(int(options.memory * 1e9), options.jobs, Path(folder))
            return
        jobs = f"jobs {options.jobs}"
        print(f"{'':14} {'GiB/s':>46} | {'of reading':>15} | {'of in cache':>15} | {'x one-liner':>15}")
        shares = " | ".join([f"{'jobs 1':>7} {jobs:>7}"] * 3)
        print(f"{'':14} {'read':>8} {'in cache':>8} {'one-liner':>10} {'jobs 1':>8} {jobs:>8} | {shares}")
        for dtype in options.dtypes:
            compare(dtype, int(options.size * GIB), options.jobs, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
