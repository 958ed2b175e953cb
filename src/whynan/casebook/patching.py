"""Apply a unified diff of one file, strictly: every line of context must stand where the diff says."""

from __future__ import annotations

import re


def file_of(diff: str) -> str:
    r"""Return the path that a diff changes.

    >>> file_of("--- a/loss.py\n+++ b/loss.py\n")
    'loss.py'
    """
    found = re.search(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)
    return found[1] if found else ""


def patched(source: str, diff: str) -> str:
    r"""Return the changed text; raise ValueError where the diff does not fit.

    >>> patched("a\nb\n", "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n")
    'a\nc\n'
    """
    old, new, at = source.splitlines(), list[str](), 0
    for line in diff.splitlines()[2:]:
        if hunk := re.match(r"@@ -(\d+)", line):
            new += old[at : int(hunk[1]) - 1]
            at = int(hunk[1]) - 1
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            if at >= len(old) or old[at] != line[1:]:
                raise ValueError(f"the diff expects {line[1:]!r} at line {at + 1}")
            new += [line[1:]] * line.startswith(" ")
            at += 1
    return "\n".join(new + old[at:]) + "\n"
