"""One diff for changes at one or several places, which `patch` accepts and after which the files compile."""

from __future__ import annotations

import ast
import builtins
import itertools
from typing import Any

from whynan.causes.edits import Lines, Placed, as_operand, below_one, compiles, edited, exchanged, import_torch, on_disk, parsed, renamed, replaced, unified
from whynan.causes.scopes import imports, loaded
from whynan.causes.source import Change, Expression


def joined(changes: list[tuple[Expression, Change]]) -> str:
    """Return one diff, with three lines of context, for changes at several places; nothing if the result would not run, or one change does away with another.

    The texts say `torch` for torch: the diff says what the file calls it, and imports it where the file does not.
    """
    files: dict[str, tuple[Expression, list[Placed], list[Lines]]] = {}
    for expression, change in _nested(changes):
        written = _written(expression, *change)
        if written is None:
            return ""
        _, placed, added = files.setdefault(expression.file, (expression, [], []))
        placed += written[0]
        added += [lines for lines in written[1] if lines not in added]
    return "".join(_of_file(*found, path) for found, path in zip(files.values(), below_one(list(files)), strict=True))


def _written(expression: Expression, node: ast.AST, text: str, *more: tuple[ast.AST, str]) -> tuple[list[Placed], list[Lines]] | None:
    """Return the texts of a change with their places, and the lines that it adds elsewhere; None if the result would not run."""
    changes = [(n, _fitted(expression, n, t)) for n, t in ((node, text), *more)]
    alias = _torch_alias(expression) if any("torch" in loaded(t) for _, t in changes) else "torch"
    if alias is None or not _knows(expression, [t for _, t in changes]):
        return None
    placed = [(*_span(n), renamed(t, "torch", alias) if alias not in ("", "torch") else t) for n, t in changes]
    return placed, [import_torch(expression.tree)] if not alias else []


def _fitted(expression: Expression, node: ast.AST, text: str) -> str:
    """Put a text in brackets where a call or a name stood that something binds to."""
    if not isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
        return text
    around = next((n for n in expression.tree if any(child is node for child in ast.iter_child_nodes(n))), None)
    binds = isinstance(around, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Attribute | ast.Await | ast.Starred)
    binds = binds or (isinstance(around, ast.Subscript) and around.value is node) or (isinstance(around, ast.Call) and around.func is node)
    return as_operand(text) if binds else text


def _torch_alias(expression: Expression) -> str | None:
    """Return the file's own name for torch, an empty string where it has none, None where `torch` is something else."""
    import torch

    found = expression.lookup("torch")
    if found is torch:
        return "torch"
    names = [name for name, value in imports(expression.tree[0]).items() if value is torch]
    alias = next((name for name in names if expression.lookup(name) is torch), "")
    return alias or (None if "torch" in expression.bound() else "")


def _knows(expression: Expression, texts: list[str]) -> bool:
    """Whether every name that the texts load exists at this place; `torch` can be had anywhere."""
    trees = [parsed(text) for text in texts]
    nodes = [n for tree in trees if tree is not None for n in ast.walk(tree)]
    made = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    known = made | expression.bound() | set(dir(builtins)) | {"torch"}
    return None not in trees and all(loaded(text) <= known for text in texts)


def _nested(changes: list[tuple[Expression, Change]]) -> list[tuple[Expression, Change]]:
    """Write changes inside of others into the text of these; those that cannot be are left, and overlap."""
    for outer, inner in itertools.permutations(range(len(changes)), 2):
        (expression, change), (other, part) = changes[outer], changes[inner]
        text = _with_part(expression, change, part) if expression.file == other.file and _holds(change[0], part[0]) else None
        if text is not None:
            merged = (expression, (change[0], text, *change[2:], *part[2:]))
            return _nested([merged if i == outer else c for i, c in enumerate(changes) if i != inner])
    return changes


def _holds(node: ast.AST, part: ast.AST) -> bool:
    (start, end), (first, last) = _span(node), _span(part)
    return start <= first and last <= end


def _with_part(expression: Expression, change: Change, part: Change) -> str | None:
    """Return the new text of a node in which a part of the node is changed as well, wherever the text repeats what holds that part."""
    node, text = change[:2]
    around = [n for n in ast.walk(node) if isinstance(n, ast.expr) and _holds(n, part[0])]  # outer ones first
    for held in around:
        inside = as_operand(part[1]) if _span(held) == _span(part[0]) else as_operand(expression.rewritten(held, part[0], _fitted(expression, *part[:2])))
        found = exchanged(text, held, inside)
        if found is not None:
            return found
    return None


def _of_file(expression: Expression, placed: list[Placed], added: list[Lines], path: str) -> str:
    edits = replaced(expression.lines, placed)
    if edits is None or not compiles("".join(edited(expression.lines, edits + added))):
        return ""
    old = on_disk(expression.code.co_filename if expression.code is not None else "", expression.lines)
    return unified(old, edited(old, edits + added), path)


def _span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
