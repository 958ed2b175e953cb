"""Write `expected.txt`, the terminal diagnosis of `bad.py`, in every folder of `tests/cases`.

    python tests/update_golden.py            # all
    python tests/update_golden.py WN501      # folders whose name contains this text

Read the difference before committing it: these texts are what a user sees.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with thread pools alive is not safe

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import corpus

ROOT = Path(__file__).resolve().parent.parent


def folders(text: str = "") -> list[Path]:
    """Return the folders of causes."""
    return [f for f in sorted(corpus.CASES.glob("WN*")) if text in f.name]


def diagnosis_of(path: Path) -> str:
    """Return the terminal diagnosis of a program's first incident; paths in it are relative to the repository."""

    def work() -> Any:
        os.chdir(ROOT)
        return corpus.watched(path)

    done = corpus.in_child(work)
    if not (done["answer"] or {}).get("told"):
        raise AssertionError(f"{path}: no diagnosis\n{done['err']}")
    return str(done["answer"]["told"])


def main(argv: list[str]) -> int:
    """Write the texts and say which changed."""
    import torch._dynamo  # noqa: F401 (optimizers import it at their first step: once here instead of in every child)

    import whynan.engine.guard  # noqa: F401 (loaded here for all forked children)

    for folder in folders(*argv[:1]):
        expected, text = folder / "expected.txt", diagnosis_of(folder / "bad.py")
        if not expected.exists() or expected.read_text(encoding="utf-8") != text:
            expected.write_text(text, encoding="utf-8")
            print(f"wrote {expected.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
