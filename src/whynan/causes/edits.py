"""Text of a program with other text in its place: edits by lines, and the unified diff that `patch` accepts."""

from __future__ import annotations

import ast
import difflib
import functools
import io
import os
import tokenize
from pathlib import PurePath

from whynan.resting import no_warnings

Place = tuple[int, int]  # a line, counted from 1, and a byte in it
Placed = tuple[Place, Place, str]  # from one place to another: this text
Lines = tuple[int, int, list[str]]  # from one line to before another, counted from 0: these lines
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def parsed(text: str) -> ast.Expression | None:
    """Parse an expression that may go over several lines, or that stands on the left of an assignment."""
    try:
        return ast.parse(f"(\n{text}\n)", mode="eval")
    except (SyntaxError, ValueError):
        return None


def renamed(text: str, name: str, new: str) -> str:
    """Write another name in the place of one."""
    tree = parsed(text)
    lines = [b"", *(line.encode() for line in text.split("\n"))]
    places = [(n.lineno - 1, n.col_offset) for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name] if tree is not None else []
    for line, column in sorted(places, reverse=True):
        lines[line] = lines[line][:column] + new.encode() + lines[line][column + len(name.encode()) :]
    return b"\n".join(lines[1:]).decode()


def exchanged(text: str, node: ast.AST, new: str) -> str | None:
    """Write another text wherever an expression says the same as a node; nothing where it nowhere does.

    >>> exchanged("torch.where(b == 0, log(a) * 0, log(a) / b)", ast.parse("log( a )", mode="eval").body, "log(a + 1)")
    'torch.where(b == 0, log(a + 1) * 0, log(a + 1) / b)'
    """
    tree, same = parsed(text), ast.dump(node)
    lines = [b"", *(line.encode() for line in text.split("\n"))]
    found = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and ast.dump(n) == same] if tree is not None else []
    for place in sorted(found, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        first, last = place.lineno - 1, (place.end_lineno or place.lineno) - 1
        tail = lines[last][place.end_col_offset :]
        lines[first : last + 1] = [lines[first][: place.col_offset] + new.encode() + tail]
    return b"\n".join(lines[1:]).decode() if found else None


def between(lines: list[bytes], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two places of a file, lines counted from 1."""
    chosen = lines[start[0] - 1 : end[0]]
    chosen[-1] = chosen[-1][: end[1]]
    chosen[0] = chosen[0][start[1] :]
    return b"".join(chosen).decode()


def lines_of(text: str) -> list[str]:
    """Cut a text into lines that keep their ends."""
    parts = text.split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def replaced(lines: list[str], changes: list[Placed]) -> list[Lines] | None:
    """Return edits that put texts in their places, one for all that share a line; None where two overlap."""
    raw = [line.encode() for line in lines]
    edits: list[Lines] = []
    groups: list[list[Placed]] = []
    for change in sorted(changes):
        if groups and change[0] < groups[-1][-1][1]:
            return None
        if groups and change[0][0] == groups[-1][-1][1][0]:
            groups[-1].append(change)
        else:
            groups.append([change])
    for group in groups:
        first, last = group[0][0][0], group[-1][1][0]
        ends = [(first, 0), *(end for _, end, _ in group)]
        kept = [between(raw, end, start) for end, (start, _, _) in zip(ends, group, strict=False)]
        tail = raw[last - 1][ends[-1][1] :].decode()
        text = "".join(before + new for before, (_, _, new) in zip(kept, group, strict=True)) + tail
        edits.append((first - 1, last, lines_of(text)))
    return edits


def edited(lines: list[str], edits: list[Lines]) -> list[str]:
    """Return lines with others in their place, with the line ends that were there."""
    new = list(lines)
    for first, last, changed in sorted(edits, key=lambda e: e[0], reverse=True):
        beside = lines[min(first, len(lines) - 1)]
        end = "\r\n" if beside.endswith("\r\n") else "\n"
        new[first:last] = [line.replace("\n", end) for line in changed]
        if last > first and not lines[last - 1].endswith("\n"):
            new[first + len(changed) - 1] = new[first + len(changed) - 1].rstrip("\r\n")
    return new


def import_torch(tree: list[ast.AST]) -> Lines:
    """Return the edit that imports torch: after the imports at the top, after the docstring, or before everything."""
    body: list[ast.stmt] = tree[0].body  # type: ignore[attr-defined]
    documented = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str)
    last = body[0] if documented else None
    for statement in body[int(documented) :]:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            break
        last = statement
    if last is None:
        decorated = getattr(body[0], "decorator_list", [])
        place = min([body[0].lineno, *(d.lineno for d in decorated)]) - 1
        return place, place, ["import torch\n", "\n"]
    place = last.end_lineno or 0
    return place, place, ["import torch\n"] if isinstance(last, ast.Import | ast.ImportFrom) else ["\n", "import torch\n"]


@functools.lru_cache(maxsize=16)
def compiles(text: str) -> bool:
    """Whether a text is a Python program; the next incident often asks for the same change of the same file."""
    try:
        with no_warnings():
            compile(text, "<diff>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def on_disk(file: str, lines: list[str]) -> list[str]:
    """Return the lines of a file with the line ends that they have there, which Python's own reading makes all alike."""
    try:
        with open(file, "rb") as stream:
            encoding, _ = tokenize.detect_encoding(stream.readline)
        with open(file, encoding="utf-8" if encoding == "utf-8-sig" else encoding, newline="") as text:
            found = text.readlines()
    except (OSError, SyntaxError, ValueError):
        return lines
    same = len(found) == len(lines) and all(a.lstrip("\ufeff").rstrip("\r\n") == b.rstrip("\n") for a, b in zip(found, lines, strict=True))
    return found if same else lines


def below_one(files: list[str]) -> list[str]:
    """Return the paths of files as one diff has them: below the working directory, or all below the root if one is not there.

    No tool takes a path that is absolute or goes up; these are applied in the directory that they are below.

    >>> below_one(["train.py"]), below_one(["/usr/lib/loss.py"])
    (['train.py'], ['usr/lib/loss.py'])
    """
    if any(map(os.path.isabs, files)):
        files = [os.path.abspath(file) if os.path.exists(file) else file for file in files]
    return [PurePath(file).relative_to(PurePath(file).anchor).as_posix() for file in files]


def unified(old: list[str], new: list[str], file: str) -> str:
    """Return a unified diff that `patch` and `git apply` accept, with three lines of context."""
    made = difflib.unified_diff(old, new, f"a/{file}", f"b/{file}", n=3)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


def as_operand(text: str) -> str:
    """Put an operand in brackets unless it binds tightly by itself."""
    tree = parsed(text)
    if tree is None:
        return text
    node = tree.body
    tight = ast.Name | ast.Attribute | ast.Call | ast.Subscript
    if isinstance(node, tight) or (isinstance(node, ast.Constant) and not isinstance(node.value, int)):
        return text
    return text if text.startswith("(") and text.endswith(")") and _one_bracket(text) else f"({text})"


def with_keyword(call: str, keyword: str, value: str) -> str:
    r"""Give a call one more argument by name, right after its last: what follows that may be a comment.

    >>> with_keyword("f(x)", "eps", "1"), with_keyword("f()", "eps", "1")
    ('f(x, eps=1)', 'f(eps=1)')
    >>> with_keyword("f(\n    x,  # the input\n)", "eps", "1")
    'f(\n    x, eps=1,  # the input\n)'
    """
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(call).readline) if t.type not in _NO_CODE]
    last = tokens[-3] if tokens[-2].string == "," else tokens[-2]
    line, column = last.end
    lines = call.split("\n")
    given = f"{keyword}={value}" if last.string == "(" else f", {keyword}={value}"
    lines[line - 1] = lines[line - 1][:column] + given + lines[line - 1][column:]
    return "\n".join(lines)


def _one_bracket(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index == len(text) - 1
    return False
