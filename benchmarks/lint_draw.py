"""Draw findings of high confidence at random from other people's code, to be judged one by one by reading.

python benchmarks/lint_draw.py SEED COUNT PATH...
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from whynan.lint import Confidence, Settings, lint_paths


def main() -> None:
    """Print the drawn findings with a few lines of source around each."""
    seed, count, *paths = sys.argv[1:]
    report = lint_paths([Path(p) for p in paths], Settings(min_confidence=Confidence.HIGH))
    print(f"{report.lines} lines, {len(report.findings)} findings of high confidence:", dict(Counter(f.code for f in report.findings).most_common()))
    drawn = random.Random(int(seed)).sample(report.findings, min(int(count), len(report.findings)))  # noqa: S311 (a draw, not a secret)
    for number, finding in enumerate(sorted(drawn, key=lambda f: (f.path, f.place.line)), 1):
        print(f"\n[{number}] {finding.path}:{finding.place.line} {finding.code} {finding.title}: {finding.label}")
        lines = Path(finding.path).read_text(encoding="utf-8").split("\n")
        for row in range(max(finding.place.line - 9, 0), min(finding.place.line + 2, len(lines))):
            print(f"{'>' if row + 1 == finding.place.line else ' '} {lines[row][:150]}")


if __name__ == "__main__":
    main()
