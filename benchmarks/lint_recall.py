"""How many origins of the corpus lint sees before anything is run, and what it says of programs that are healthy.

An origin counts as seen where a finding with a cause code (WN…, not a practice WL…) stands on the marked line, on a line of the
same statement, or names that line as its second place.

    python benchmarks/lint_recall.py [--missed]
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import corpus

from whynan.lint import Confidence, Finding, Settings, lint_paths

ALL = Settings(min_confidence=Confidence.LOW)


def statement_lines(path: Path, line: int) -> set[int]:
    """The lines of the smallest statement around a line."""
    best = {line}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0) and not hasattr(node, "body"):
            best |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return best


def seen(program: corpus.Program) -> Finding | None:
    """The surest finding at the origin of a program."""
    wanted = statement_lines(program.path, program.line)
    found = [f for f in lint_paths([program.path], ALL).findings if f.code.startswith("WN")]
    here = [f for f in found if wanted & set(range(f.place.line, f.place.end_line + 1)) or (f.origin is not None and f.origin.line in wanted)]
    return max(here, key=lambda f: (f.code == program.code, *f.weight), default=None)


def main() -> None:
    """Print the table."""
    programs = corpus.failing()
    answers = [(p, seen(p)) for p in programs]
    found = [(p, f) for p, f in answers if f is not None]
    levels = Counter(str(f.confidence) for _, f in found)
    print(f"origins seen: {len(found)} of {len(programs)} ({len(found) / len(programs):.0%}); with the same code {sum(p.code == f.code for p, f in found)}")
    print("  by confidence:", ", ".join(f"{level} {levels[level]}" for level in ("high", "medium", "low")))
    if "--missed" in sys.argv:
        for program, _ in [(p, f) for p, f in answers if f is None]:
            print("  missed:", program.name, program.line)
    quiet = [f for p in corpus.healthy() for f in lint_paths([p.path], ALL).findings]
    print(f"healthy and healed programs: {len(corpus.healthy())}; findings on them:", dict(Counter(str(f.confidence) for f in quiet)))
    for finding in quiet:
        if finding.confidence is Confidence.HIGH or ("--medium" in sys.argv and finding.confidence is Confidence.MEDIUM):
            print(f"  {finding.confidence} on a healthy program:", finding.path[-60:], finding.place.line, finding.code, finding.title)


if __name__ == "__main__":
    main()
