"""How many lines a second lint looks at, beside ruff on the same tree, and whether the time grows with the size.

    python benchmarks/lint_speed.py PATH...     (default: the sources of the installed torch)

CPU seconds of one process; ruff runs with one thread and without its cache. Nothing of lint is cached between runs: a warm run is one
whose files are in the page cache of the system.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from whynan.lint import Settings, lint_paths
from whynan.lint.files import discover


def lines_below(path: Path) -> int:
    """The lines of all Python files below a path."""
    return sum(p.read_bytes().count(b"\n") for p in discover([path], Settings(), []))


def whynan_seconds(path: Path) -> tuple[float, int, int]:
    """CPU seconds, lines of the files that mention torch, findings."""
    lint_paths([path])
    start = time.process_time()
    report = lint_paths([path])
    return time.process_time() - start, report.lines, len(report.findings)


def ruff_seconds(path: Path) -> float | None:
    """CPU seconds of ruff with its default rules."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ruff is None:
        return None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(  # noqa: S603 (the ruff beside this Python)
        [ruff, "check", "--no-cache", "--isolated", "--quiet", "--exit-zero", str(path)],
        env={**os.environ, "RAYON_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def growth(path: Path) -> None:
    """Print the time of one file repeated: twice the lines, twice the time."""
    import tempfile

    source = max((p for p in discover([path], Settings(), []) if b"torch" in p.read_bytes()), key=lambda p: p.stat().st_size)
    text = source.read_text(encoding="utf-8")
    for times in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "repeated.py"
            file.write_text("\n".join([text] * times), encoding="utf-8")
            start = time.process_time()
            report = lint_paths([file])
            seconds = time.process_time() - start
        print(f"  {source.name} x {times}: {report.lines:>8} lines  {seconds:6.2f} s  {report.lines / seconds:>8.0f} lines/s")


def main() -> None:
    """Print the table."""
    spec = find_spec("torch")
    paths = [Path(p) for p in sys.argv[1:]] or ([Path(spec.origin).parent] if spec is not None and spec.origin else [])
    for path in paths:
        seconds, looked, found = whynan_seconds(path)
        every = lines_below(path)
        other = ruff_seconds(path)
        print(f"{path.name}: {every} lines, {looked} in files that mention torch, {found} findings")
        print(f"  whynan {seconds:6.2f} s  {every / seconds:>9.0f} lines/s ({looked / seconds:.0f} counting only files that mention torch)")
        if other is not None:
            print(f"  ruff   {other:6.2f} s  {every / other:>9.0f} lines/s; whynan takes {seconds / other:.1f} times as long")
        growth(path)


if __name__ == "__main__":
    main()
