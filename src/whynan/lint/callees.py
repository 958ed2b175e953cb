"""Which function of the project a call runs: by name, through imports, as a method, or as the forward pass of an instance."""

from __future__ import annotations

import ast

from whynan.lint.model import Function, Module, Owner, Scope


def target(node: ast.Call, scope: Scope) -> tuple[Function, Scope] | None:
    """The function or method of the project that a call runs."""
    module, function = scope.module, node.func
    if isinstance(function, ast.Name):
        if function.id in module.functions:
            return _in(module, module.functions[function.id], None)
        dotted = module.imports.get(function.id)
        if dotted:
            return _elsewhere(module, dotted)
        return _instance(function, scope)
    if isinstance(function, ast.Attribute):
        dotted = module.dotted(function)
        if dotted:
            return _elsewhere(module, dotted)
        if isinstance(function.value, ast.Name) and function.value.id in ("self", "cls") and scope.owner is not None:
            method = scope.owner.methods.get(function.attr)
            return _in(module, method, scope.owner) if method is not None else _instance(function, scope)
        owner = owner_of(function.value, scope)
        if owner is not None and function.attr in owner[1].methods:
            return _in(owner[0], owner[1].methods[function.attr], owner[1])
    return None


def _in(module: Module, function: Function, owner: Owner | None) -> tuple[Function, Scope]:
    return function, module.scope_of(function, owner)


def _elsewhere(module: Module, dotted: str) -> tuple[Function, Scope] | None:
    found = module.imported(dotted)
    if found is None or found[1] not in found[0].functions:
        return None
    return _in(found[0], found[0].functions[found[1]], None)


def _instance(node: ast.expr, scope: Scope) -> tuple[Function, Scope] | None:
    """net(x), self.net(x): the forward method of the class that net was made from."""
    owner = owner_of(node, scope)
    if owner is None or "forward" not in owner[1].methods:
        return None
    return _in(owner[0], owner[1].methods["forward"], owner[1])


def made_by(node: ast.expr, scope: Scope) -> ast.expr | None:
    """The expression that a name or an attribute of self was assigned."""
    if isinstance(node, ast.Name):
        bound = scope.reaching(node.id, (node.lineno, node.col_offset))
        if bound is None and scope.parent is not None and not scope.parameter(node.id)[0]:
            bound = scope.parent.bindings.get(node.id, [])[-1:]
        return bound[0].value if bound and not bound[0].loop else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self" and scope.owner is not None:
        assigned = scope.module.fields(scope.owner).get(node.attr, [])
        return assigned[0][0] if assigned else None
    return None


def owner_of(node: ast.expr, scope: Scope) -> tuple[Module, Owner] | None:
    """The class that a name or an attribute of self is an instance of."""
    made = made_by(node, scope)
    while (
        isinstance(made, ast.Call)
        and isinstance(made.func, ast.Attribute)
        and made.func.attr in ("to", "half", "cuda", "float", "eval", "train", "double", "bfloat16")
    ):
        made = made.func.value
    if not isinstance(made, ast.Call):
        return None
    if isinstance(made.func, ast.Name) and made.func.id in scope.module.owners:
        return scope.module, scope.module.owners[made.func.id]
    dotted = scope.module.dotted(made.func)
    found = scope.module.imported(dotted) if dotted and not dotted.startswith("torch.") else None
    return (found[0], found[0].owners[found[1]]) if found is not None and found[1] in found[0].owners else None


def layer(node: ast.expr, scope: Scope) -> str:
    """The torch.nn class that a callable was made from; of a Sequential, the last one."""
    made = made_by(node, scope)
    if not isinstance(made, ast.Call):
        return ""
    dotted = scope.module.dotted(made.func)
    if dotted.endswith("nn.Sequential") and made.args and isinstance(made.args[-1], ast.Call):
        dotted = scope.module.dotted(made.args[-1].func)
    return dotted.rpartition(".")[2] if dotted.startswith("torch.nn") else ""


def own_returns(function: Function) -> list[ast.Return]:
    """The return statements of a function, those of functions in it left out."""
    found: list[ast.Return] = []
    stack: list[ast.stmt] = list(function.body)
    while stack:
        s = stack.pop()
        if isinstance(s, ast.Return):
            found.append(s)
        elif not isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in ("body", "orelse", "finalbody"):
                stack.extend(x for x in getattr(s, block, []) if isinstance(x, ast.stmt))
            for handler in getattr(s, "handlers", []):
                stack.extend(handler.body)
    return found
