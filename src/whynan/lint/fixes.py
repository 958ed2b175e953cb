"""Changing source: the edits of findings applied to text, shown as a diff or written back."""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import os
import re
import tempfile
import tokenize
from pathlib import Path

from whynan.lint.files import decode
from whynan.lint.findings import Edit, Finding


def wanted(findings: list[Finding], unsafe: bool) -> dict[str, list[Finding]]:
    """The findings that can be mended, by file. Notebooks are left as they are."""
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.fix is not None and not finding.cell and (unsafe or finding.fix.safe):
            found.setdefault(finding.path, []).append(finding)
    return found


def mended(text: str, findings: list[Finding]) -> tuple[str, int]:
    """Return a text with the fixes applied, and how many were; of two that touch the same place the surer stays.

    A text that would no longer parse is returned as it was.
    """
    chosen: list[Edit] = []
    count = 0
    for finding in sorted(findings, key=lambda f: f.weight, reverse=True):
        assert finding.fix is not None
        if not any(_touch(a, b) for a in finding.fix.edits for b in chosen):
            chosen.extend(finding.fix.edits)
            count += 1
    lines = text.split("\n")
    for edit in sorted(chosen, key=lambda e: (e.place.line, e.place.column), reverse=True):
        place = edit.place
        joined = lines[place.line - 1][: place.column] + edit.text + lines[place.end_line - 1][place.end_column :]
        lines[place.line - 1 : place.end_line] = joined.split("\n")
    changed = "\n".join(lines)
    try:
        ast.parse(changed)
    except (SyntaxError, ValueError, RecursionError):
        return text, 0
    return changed, count


def _touch(a: Edit, b: Edit) -> bool:
    first, second = sorted((a.place, b.place), key=lambda p: (p.line, p.column))
    return (second.line, second.column) < (first.end_line, first.end_column) or first == second


def diff(path: str, before: str, after: str) -> str:
    """A unified diff of one file."""
    return "".join(difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), path, path))


def write(path: Path, before: str, after: str) -> None:
    """Write a file back in its own encoding and with its own line ends.

    The new text is complete beside the old one before it takes its place: a full disk or Ctrl-C costs nothing.
    """
    raw = path.read_bytes()
    if decode(raw) != before:
        return  # changed since it was read
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    with path.open("r+b"):
        pass  # a file that may not be written is not replaced either
    target = path.resolve()  # a link stays a link
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_with_ends(after, before, raw.decode(encoding)).encode(encoding))
            file.flush()
            os.fsync(file.fileno())
        status = target.stat()
        os.chmod(beside, status.st_mode & 0o7777)
        with contextlib.suppress(OSError):  # only its owner, or root, can give a file away
            os.chown(beside, status.st_uid, status.st_gid)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def _with_ends(after: str, before: str, written: str) -> str:
    """A text with the line ends that each of its lines had; a new line gets that of the line above."""
    ends = re.findall(r"\r\n|\r|\n", written)
    if len(set(ends)) < 2:
        return after.replace("\n", ends[0] if ends else "\n")
    old, new = before.split("\n"), after.split("\n")
    kept: list[str] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        taken = ends[i:j] if tag == "equal" else ends[i : min(j, i + m - k)]
        kept += taken + [(taken or kept or ends)[-1]] * (m - k - len(taken))
    return "".join(line + end for line, end in zip(new, [*kept[: len(new) - 1], ""], strict=True))
