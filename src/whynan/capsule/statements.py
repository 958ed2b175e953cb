"""The statements of a script that define things, and the classes and functions in its text. Copied into a capsule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import Any

_FACTORIES = ("namedtuple", "TypeVar", "NewType", "Enum", "IntEnum", "getLogger", "partial", "make_dataclass", "ParamSpec", "NamedTuple", "TypedDict", "device")
_SIMPLE = (ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.Tuple, ast.List, ast.Dict, ast.Set,
           ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.IfExp, ast.Lambda, ast.arguments, ast.arg, ast.keyword, ast.Starred,
           ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)  # fmt: skip


def definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Keep of a script what defines things, leave out what does things."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if all(isinstance(t, ast.Name | ast.Tuple) for t in targets) and (statement.value is None or _is_simple(statement.value)):
                yield statement
        elif isinstance(statement, ast.Try):
            yield from _trimmed(statement, ("body", "orelse", "finalbody"))
        elif isinstance(statement, ast.If) and _is_simple(statement.test) and "__main__" not in ast.unparse(statement.test):
            yield from _trimmed(statement, ("body", "orelse"))


def _trimmed(statement: Any, fields: tuple[str, ...]) -> Iterator[ast.stmt]:
    for name in fields:
        setattr(statement, name, list(definitions(getattr(statement, name))))
    for handler in getattr(statement, "handlers", []):
        handler.body = list(definitions(handler.body)) or [ast.copy_location(ast.Pass(), handler)]
    if statement.body:
        yield statement


def _is_simple(value: ast.expr) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in _FACTORIES:
                return False
        elif not isinstance(node, _SIMPLE):
            return False
    return True


def find_code(code: CodeType, name: str, line: int, nth: int = 0) -> CodeType | None:
    """Find a function's code inside that of its file by qualified name and first line; the n-th of the lambdas of one line."""
    found = _codes_at(code, name, line)
    return found[nth] if 0 <= nth < len(found) else None


def number_of(text: str, code: CodeType) -> int:
    """Return which of the functions of its name and line a code object is.

    >>> number_of("a, b = lambda: 1, lambda: 2", compile("a, b = lambda: 1, lambda: 2", "", "exec").co_consts[1])
    1
    """
    try:
        whole = compile(text, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    at = [list(c.co_positions()) for c in _codes_at(whole, code.co_qualname, code.co_firstlineno)]
    return at.index(list(code.co_positions())) if list(code.co_positions()) in at else 0


def _codes_at(code: CodeType, name: str, line: int) -> list[CodeType]:
    if code.co_qualname == name and (code.co_firstlineno == line or name == "<module>"):
        return [code]
    return [found for constant in code.co_consts if isinstance(constant, CodeType) for found in _codes_at(constant, name, line)]


def find_class(tree: ast.Module, name: str, line: int) -> ast.ClassDef | None:
    """Find a class statement by its own name, the one around a line where several have it."""
    last = name.rpartition(".")[2]
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == last]
    around = [n for n in found if n.lineno <= line <= (n.end_lineno or n.lineno) or line in (n.lineno, *(d.lineno for d in n.decorator_list))]
    return (around or found or [None])[-1]  # type: ignore[list-item]
