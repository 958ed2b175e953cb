"""The source expression at a site: its operands as text, and what its names stand for."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from whynan.causes.edits import (
    between,
)
from whynan.causes.scopes import (
    FUNCTIONS,
    UNKNOWN,
    arguments_of,
    assignments,
    bare,
    draws,
    globals_of,
    imports,
    is_method,
    is_torch,
    last_name,
    loaded_by,
    member,
    stored,
)

if TYPE_CHECKING:
    from whynan.capsule.sites import Site

_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul", ast.Mod: "remainder",
}  # fmt: skip
_COMPARISONS = {ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne"}
_PLACES = {"input": 0, "other": 1, "exponent": 1, "target": 1}  # where torch's functions take an operand that is given by its name
_PURE_BUILTINS = frozenset({"len", "abs", "float", "int", "max", "min", "sum", "range", "tuple", "list", "bool", "round", "isinstance", "slice"})
Calls = Callable[["Site"], list[str]]  # the torch functions that a replay saw called at a site, by their readable names


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
    code: CodeType | None = None
    calls: Calls | None = None

    @property
    def text(self) -> str:
        return self.segment(self.node)

    @property
    def tree(self) -> list[ast.AST]:
        """All nodes of the file, outer ones first."""
        return _nodes("".join(self.lines))

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

    def rewritten(self, node: ast.AST, inner: ast.AST, text: str) -> str:
        """Return the text of a node with other text in the place of a part of it."""
        lines = [line.encode() for line in self.lines]
        head = between(lines, (node.lineno, node.col_offset), (inner.lineno, inner.col_offset))  # type: ignore[attr-defined]
        tail = between(lines, (inner.end_lineno, inner.end_col_offset), (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
        return head + text + tail

    def bound(self) -> set[str]:
        """The names that exist at this place: those it reads already, of the function, of the one around it, of the module."""
        code, around = self.code, self.function
        found = set(code.co_varnames + code.co_freevars + code.co_cellvars) if code is not None else set()
        found |= set(globals_of(code) or ()) | stored(self.tree[0]) | set(imports(self.tree[0]))
        return found | loaded_by(self.node) | (stored(around) | set(imports(around)) if around is not None else set())

    def free_name(self, stem: str) -> str:
        """Return a name that nothing in this file has."""
        used = {n.id for n in self.tree if isinstance(n, ast.Name)} | {a.arg for a in self.tree if isinstance(a, ast.arg)} | self.bound()
        return next(name for name in (stem, *(f"{stem}_{number}" for number in range(2, 1000))) if name not in used)

    # -- what its names stand for -------------------------------------------------------------------------------------

    def lookup(self, name: str) -> Any:
        """Return what a name of this place stands for; UNKNOWN for a variable of the function."""
        function = self.function
        if isinstance(function, FUNCTIONS) and name in (inside := imports(function)):
            return inside[name]
        code = self.code
        if code is not None and name in code.co_varnames + code.co_freevars + code.co_cellvars:
            return UNKNOWN
        if isinstance(function, FUNCTIONS) and name in stored(function):
            return UNKNOWN
        globals_ = globals_of(code) or {}
        return globals_[name] if name in globals_ else imports(self.tree[0]).get(name, getattr(builtins, name, UNKNOWN))

    def value_of(self, node: ast.AST) -> Any:
        """Return what a name with dots stands for, as far as it is known without running anything."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        return member(self.value_of(node.value), node.attr) if isinstance(node, ast.Attribute) else UNKNOWN

    def parts(self, node: ast.AST) -> tuple[str, list[ast.expr]]:
        """Return a call's bare name and its operands; the tensor of a method comes first. Nothing where it cannot be decided."""
        if not isinstance(node, ast.Call):
            return "", []
        func = node.func
        if isinstance(func, ast.Attribute):
            kind = self.receiver(node)
            given = [func.value] if kind == "tensor" else []
            return ("", []) if not kind else (func.attr, _placed([*given, *node.args], node))
        return (func.id if isinstance(func, ast.Name) else ""), _placed(list(node.args), node)

    def receiver(self, node: ast.Call) -> str:
        """Say what stands before the dot of a call: a `namespace`, a `tensor`, an `object`; nothing where that cannot be decided."""
        import torch

        func = node.func
        assert isinstance(func, ast.Attribute)
        value = self.value_of(func.value)
        if isinstance(value, ModuleType | type):
            return "namespace"
        if isinstance(value, torch.Tensor | torch.nn.Module):
            return "tensor" if isinstance(value, torch.Tensor) else "object"
        if self._is_instance(func.value):
            return "object"
        method, name, seen = is_method(func.attr), func.attr.strip("_"), self._seen(node)
        if self.calls is None or any(called.startswith(("Tensor.", "torch._tensor.")) and bare(called) == name for called in seen):
            return "tensor" if method else "object"
        if self._rooted_in_instance(func.value):
            return "object" if seen else ""
        return "object" if any(bare(called) == name for called in seen) or not method else "tensor"

    def _seen(self, node: ast.Call) -> list[str]:
        if self.calls is None or self.code is None:
            return []
        from whynan.capsule.sites import Site

        return [name for site in sites_of_node(Site(self.code, 0), node) for name in self.calls(site)]

    def _is_instance(self, node: ast.AST) -> bool:
        """Whether a name is the instance that a method is called on, of a class that is no tensor."""
        import torch

        function = self.function
        if not isinstance(node, ast.Name) or not isinstance(function, FUNCTIONS):
            return False
        around = next((c for c in self.tree if isinstance(c, ast.ClassDef) and any(f is function for f in c.body)), None)
        arguments = [*function.args.posonlyargs, *function.args.args]
        if around is None or not arguments or arguments[0].arg != node.id or any("staticmethod" in ast.dump(d) for d in function.decorator_list):
            return False
        kinds = [self.value_of(base) for base in around.bases]
        return not any(isinstance(kind, type) and issubclass(kind, torch.Tensor) for kind in kinds)

    def _rooted_in_instance(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return self._is_instance(node)

    def calls_object(self) -> bool:
        """Whether what is called is an object made elsewhere (`self.crit(…)`), not a function or a method of a tensor."""
        if not isinstance(self.node, ast.Call):
            return False
        value = self.value_of(self.node.func)
        if value is not UNKNOWN:
            return not (isinstance(value, type) or inspect.isroutine(value) or is_torch(value))
        return not isinstance(self.node.func, ast.Attribute) or self.receiver(self.node) not in ("tensor", "namespace")

    def construction(self, call: ast.AST | None = None) -> tuple[ast.Call, type] | None:
        """Return the one call in this file that makes the module of torch which is called here, and its class."""
        import torch

        func = getattr(call or self.node, "func", None)
        name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
        if not name or (isinstance(func, ast.Name) and name in arguments_of(self.function)):
            return None
        made = [value for target, value in assignments(self.tree) if type(target) is type(func) and last_name(target) == name]
        if len(made) != 1 or not isinstance(made[0], ast.Call):
            return None
        kind = replace(self, function=None, code=None).value_of(made[0].func)
        if kind is UNKNOWN and isinstance(made[0].func, ast.Name | ast.Attribute):
            kind = self.value_of(made[0].func)
        fits = isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__.startswith("torch.nn.")
        return (made[0], kind) if fits else None

    def is_repeatable(self, node: ast.AST) -> bool:
        """Whether a text may be evaluated once more or later: no call in it draws a random number or may change something."""
        return all(self._is_pure(n) for n in ast.walk(node) if isinstance(n, ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom))

    def _is_pure(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            return False
        name = last_name(node.func)
        if draws(name) or (name.endswith("_") and not name.endswith("__")):
            return False
        value = self.value_of(node.func)
        if isinstance(node.func, ast.Name):
            return is_torch(value) or (name in _PURE_BUILTINS and value is getattr(builtins, name))
        kind = self.receiver(node)
        return is_method(name) if kind == "tensor" else kind == "namespace" and (is_torch(value) or getattr(value, "__module__", "") == "math")

    # -- its surroundings ---------------------------------------------------------------------------------------------

    def as_plain_call(self) -> Expression:
        """Read a call as one of a function or module: the part before the dot is not an operand."""
        if not isinstance(self.node, ast.Call):
            return self
        nodes = _placed(list(self.node.args), self.node)
        return replace(self, nodes=nodes, operands=[self.segment(n) for n in nodes])

    def with_calls(self, calls: Calls) -> Expression:
        """Read it again, with what a replay saw called at each place."""
        found = replace(self, calls=calls, operands=[], nodes=[], keywords={}, name="")
        _fill(found)
        return found

    def parents(self) -> list[ast.AST]:
        """Return the nodes around this expression, innermost first."""
        chain: list[ast.AST] = []
        for node in ast.walk(self.function or ast.Module([], [])):
            inside = any(child is self.node for child in ast.walk(node))
            if inside and node is not self.node and isinstance(node, ast.expr):
                chain.append(node)
        return chain[::-1]

    def assigned(self, name: str) -> ast.expr | None:
        """Return the one expression a local name was assigned before this place, if there is exactly one and it still holds."""
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
        if len(found) != 1 or isinstance(found[0], ast.Constant):
            return None
        return found[0] if not self._changed_since(found[0]) else None

    def _changed_since(self, made: ast.expr) -> bool:
        """Whether a name in an expression was given another value between there and here."""
        used = loaded_by(made)
        later = (n for n in ast.walk(self.function or made) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in used)
        start = self._statement_line()
        return any((made.end_lineno or 0) < n.lineno < start for n in later)

    def _statement_line(self) -> int:
        """The first line of the statement around this place: what it assigns is assigned after it."""
        around = (n.lineno for n in self.tree if isinstance(n, ast.stmt) and n.lineno <= self.node.lineno <= (n.end_lineno or 0))
        return max(around, default=self.node.lineno)


Change = tuple[Any, ...]  # a node and its new text, and further pairs of both


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
    place = positions(site)
    try:
        nodes = _nodes("".join(lines))
    except (SyntaxError, ValueError):
        return None
    for node in nodes:
        if isinstance(node, ast.expr | ast.AugAssign) and place in _positions(node):
            found = Expression(shown, node, lines, function=_function_around(nodes, place[0]), code=site.code)
            return found if _fill(found) else None
    return None


def sites_of_node(site: Site, node: ast.AST) -> frozenset[Site]:
    """Return the instructions of another expression of the same function."""
    from whynan.capsule.sites import Site

    wanted = _positions(node)
    return frozenset(Site(site.code, 2 * index) for index, place in enumerate(site.code.co_positions()) if place in wanted)


def _positions(node: Any) -> list[tuple[int, int, int, int]]:
    """Return what Python may say of where an expression stands: a method that is not on the first line of its call begins at its own name."""
    whole = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
    named = node.func if isinstance(node, ast.Call) else node
    if not isinstance(named, ast.Attribute) or named.end_lineno in (None, node.lineno):
        return [whole]
    start = (named.end_col_offset or 0) - len(named.attr)
    return [whole, (named.end_lineno or 0, node.end_lineno, start, node.end_col_offset)]


def _function_around(nodes: list[ast.AST], line: int) -> ast.AST:
    best = nodes[0]
    for node in nodes:
        if isinstance(node, FUNCTIONS) and node.lineno <= line <= (node.end_lineno or 0):
            best = node
    return best


def _fill(found: Expression) -> bool:
    node = found.node
    if isinstance(node, ast.BinOp):
        found.name, found.nodes = _OPERATORS.get(type(node.op), ""), [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        found.name, found.nodes = _OPERATORS.get(type(node.op), ""), [node.target, node.value]
    elif isinstance(node, ast.Call):
        found.name, found.nodes = found.parts(node)
        found.name = found.name or last_name(node.func)
        found.keywords = {k.arg: found.segment(k.value) for k in node.keywords if k.arg and k.value not in found.nodes}
    elif isinstance(node, ast.UnaryOp):
        found.name, found.nodes = "neg", [node.operand]
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        found.name, found.nodes = _COMPARISONS.get(type(node.ops[0]), ""), [node.left, node.comparators[0]]
    found.operands = [found.segment(n) for n in found.nodes]
    return True


def _placed(operands: list[ast.expr], node: ast.Call) -> list[ast.expr]:
    """Add the operands that a call gives by name, where they come right after the others."""
    named = {_PLACES[k.arg]: k.value for k in node.keywords if k.arg in _PLACES}
    while len(operands) in named:
        operands = [*operands, named[len(operands)]]
    return operands


def positioned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bring the operands that a call of torch gives by name into their places.

    >>> positioned((), {"exponent": -0.5, "input": "x", "out": None})
    (('x', -0.5), {'out': None})
    """
    named = {_PLACES[name]: name for name in kwargs if name in _PLACES}
    while len(args) in named:
        name = named[len(args)]
        args, kwargs = (*args, kwargs[name]), {k: v for k, v in kwargs.items() if k != name}
    return args, kwargs
