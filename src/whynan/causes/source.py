"""The source expression at a site: its operands as text, and the file with another expression in its place."""

from __future__ import annotations

import ast
import difflib
import functools
import linecache
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whynan.capsule.sites import Site

_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul", ast.Mod: "remainder",
}  # fmt: skip
_COMPARISONS = {ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne"}
_NAMESPACES = frozenset({"torch", "F", "nn", "functional", "linalg", "special", "fft", "func", "th", "ops"})


@dataclass(slots=True)
class Expression:
    """One call or operator in the user's file."""

    file: str
    node: ast.expr | ast.AugAssign
    lines: list[str]
    name: str = ""  # log, div, softmax …
    operands: list[str] = field(default_factory=list)
    nodes: list[ast.expr] = field(default_factory=list)
    keywords: dict[str, str] = field(default_factory=dict)
    function: ast.AST | None = None

    @property
    def text(self) -> str:
        return self.segment(self.node)

    def segment(self, node: ast.AST) -> str:
        """Return the source text of a node."""
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        if last >= len(self.lines):
            return ast.unparse(node)
        start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]  # counted in bytes
        lines = [line.encode() for line in self.lines[first : last + 1]]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        return b"".join(lines).decode()

    def replaced(self, node: ast.AST, text: str) -> list[str]:
        """Return the file's lines with a node replaced by other text."""
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        head = self.lines[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
        tail = self.lines[last].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
        return [*self.lines[:first], head + text + tail, *self.lines[last + 1 :]]

    def diff(self, node: ast.AST, text: str) -> str:
        """Return a unified diff that `patch` accepts, with three lines of context; nothing if the result is not Python."""
        new = self.replaced(node, text)
        try:
            ast.parse("".join(new))
        except SyntaxError:
            return ""
        return "".join(difflib.unified_diff(self.lines, new, f"a/{self.file}", f"b/{self.file}", n=3))

    def as_plain_call(self) -> Expression:
        """Read a call as one of a function or module: the part before the dot is not an operand."""
        if not isinstance(self.node, ast.Call):
            return self
        nodes = list(self.node.args)
        return replace(self, nodes=nodes, operands=[self.segment(n) for n in nodes])

    def parents(self) -> list[ast.AST]:
        """Return the nodes around this expression, innermost first."""
        chain: list[ast.AST] = []
        for node in ast.walk(self.function or ast.Module([], [])):
            inside = any(child is self.node for child in ast.walk(node))
            if inside and node is not self.node and isinstance(node, ast.expr):
                chain.append(node)
        return chain[::-1]

    def assigned(self, name: str) -> ast.expr | None:
        """Return the one expression a local name was assigned before this place, if there is exactly one."""
        if self.function is None:
            return None
        found: list[ast.expr] = []
        for node in ast.walk(self.function):
            if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for leaf in ast.walk(target):
                    if isinstance(leaf, ast.Name) and leaf.id == name and node.lineno <= self.node.lineno:
                        found.append(node.value if isinstance(node, ast.Assign) and target is leaf else ast.Constant(None))
        return found[0] if len(found) == 1 and not isinstance(found[0], ast.Constant) else None


@functools.lru_cache(maxsize=8)
def _nodes(text: str) -> list[ast.AST]:
    """Parse a file, outer nodes first; the next incident is often born in the same one."""
    return list(ast.walk(ast.parse(text)))


def expression_at(site: Site | None, shown: str) -> Expression | None:
    """Parse the file a site lies in and return the expression at exactly its columns."""
    from whynan.capsule.sites import positions

    if site is None:
        return None
    lines = linecache.getlines(site.code.co_filename)
    line, end_line, column, end_column = positions(site)
    try:
        nodes = _nodes("".join(lines))
    except (SyntaxError, ValueError):
        return None
    for node in nodes:
        if not isinstance(node, ast.expr | ast.AugAssign):
            continue
        if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (line, end_line, column, end_column):
            found = Expression(shown, node, lines, function=_function_around(nodes, line))
            return found if _fill(found) else None
    return None


def sites_of_node(site: Site, node: ast.AST) -> frozenset[Site]:
    """Return the instructions of another expression of the same function."""
    from whynan.capsule.sites import Site

    wanted = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)  # type: ignore[attr-defined]
    return frozenset(
        Site(site.code, 2 * index) for index, place in enumerate(site.code.co_positions()) if place == (wanted[0], wanted[1], wanted[2], wanted[3])
    )


def _function_around(nodes: list[ast.AST], line: int) -> ast.AST:
    best = nodes[0]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            best = node
    return best


def _fill(found: Expression) -> bool:
    node = found.node
    if isinstance(node, ast.BinOp):
        found.name, found.nodes = _OPERATORS.get(type(node.op), ""), [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        found.name, found.nodes = _OPERATORS.get(type(node.op), ""), [node.target, node.value]
    elif isinstance(node, ast.Call):
        found.name, found.nodes = call_parts(node)
        found.keywords = {k.arg: found.segment(k.value) for k in node.keywords if k.arg}
    elif isinstance(node, ast.UnaryOp):
        found.name, found.nodes = "neg", [node.operand]
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        found.name, found.nodes = _COMPARISONS.get(type(node.ops[0]), ""), [node.left, node.comparators[0]]
    found.operands = [found.segment(n) for n in found.nodes]
    return True


def call_parts(node: ast.Call) -> tuple[str, list[ast.expr]]:
    """Return a call's bare name and its operands; the receiver of a method comes first."""
    func = node.func
    if isinstance(func, ast.Name):
        return func.id, list(node.args)
    if isinstance(func, ast.Attribute):
        root = func.value
        is_namespace = isinstance(root, ast.Name | ast.Attribute) and (root.id if isinstance(root, ast.Name) else root.attr) in _NAMESPACES
        return func.attr, list(node.args) if is_namespace else [root, *node.args]
    return "", list(node.args)


def as_operand(text: str) -> str:
    """Put an operand in brackets unless it binds tightly by itself."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return text
    tight = ast.Name | ast.Attribute | ast.Call | ast.Subscript
    if isinstance(node, tight) or (isinstance(node, ast.Constant) and not isinstance(node.value, int)):
        return text
    return text if text.startswith("(") and text.endswith(")") and _one_bracket(text) else f"({text})"


def _one_bracket(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index == len(text) - 1
    return False
