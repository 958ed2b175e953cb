"""Whether anyone wants a gradient through a value: it comes from an argument, a weight or a module, not from targets or stored data alone."""

from __future__ import annotations

import ast
import re

from whynan.lint.calls import operation
from whynan.lint.model import Scope
from whynan.lint.values import Values

_TARGET = re.compile(r"(^|_)(targets?|teachers?|labels?|gts?|truths?|gold|y_?true|y_?trues|references?)\d*($|_)", re.IGNORECASE)
_CUT = frozenset({"detach", "item", "data", "shape", "size", "numel", "tolist", "numpy", "requires_grad"})
_STEPS = 80  # expressions that are looked at: keeps the time linear


def flows(node: ast.expr, scope: Scope, values: Values, arguments: bool = True) -> bool:
    """Whether a gradient can be wanted through an expression; without arguments: only through a weight or the output of a module."""
    stack: list[ast.AST] = [node]
    seen: set[str] = set()
    for _ in range(_STEPS):
        if not stack:
            return False
        one = stack.pop()
        if isinstance(one, ast.Name):
            if one.id not in seen and _begins(one, scope, stack) and arguments:
                return True
            seen.add(one.id)
        elif isinstance(one, ast.Attribute) and _is_self(one.value):
            if values.of(one, scope).kind in ("weight", "linear", "module"):
                return True
        elif isinstance(one, ast.Call) and operation(scope.module, one) is None and (one.args or one.keywords) and _is_module(one.func, scope):
            return True
        elif not _cuts(one):
            stack.extend(ast.iter_child_nodes(one))
    return False


def _begins(name: ast.Name, scope: Scope, stack: list[ast.AST]) -> bool:
    """Whether a name is an argument that a gradient is wanted for; else what it was assigned is looked at next."""
    bound = scope.reaching(name.id, (name.lineno, name.col_offset))
    if bound is None:
        return scope.parameter(name.id)[0] and name.id != "self" and not _TARGET.search(name.id)
    stack.extend(b.value for b in bound if b.value is not None)
    return False


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_module(function: ast.expr, scope: Scope) -> bool:
    """self.net(x), or a call of a name that is a local value: most likely a module."""
    if isinstance(function, ast.Attribute):
        return _is_self(function.value) and not (scope.owner is not None and function.attr in scope.owner.methods)
    return isinstance(function, ast.Name) and (function.id in scope.bindings or scope.parameter(function.id)[0])


def _cuts(node: ast.AST) -> bool:
    """What ends the way of a gradient: detach, a number, a comparison, an entry of a batch by its name."""
    if isinstance(node, ast.Compare | ast.Constant):
        return True
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in _CUT
    return isinstance(node, ast.Attribute) and node.attr in _CUT
