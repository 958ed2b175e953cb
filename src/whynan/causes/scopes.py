"""What the names in a program's source stand for: its modules, its imports, what a scope binds and reads."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

from whynan.causes.edits import parsed

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_OWN_SCOPE = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.ClassDef
UNKNOWN: Any = object()


def globals_of(code: CodeType | None) -> dict[str, Any] | None:
    """Return the global names of the module that a code object belongs to, where that module runs in this process."""
    if code is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == code.co_filename:
            return frame.f_globals
        frame = frame.f_back
    file = os.path.abspath(code.co_filename)
    for module in list(sys.modules.values()):
        held = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(held, str) and os.path.abspath(held) == file:
            return vars(module)
    return None


def member(value: Any, name: str) -> Any:
    """Return an attribute without running code of it."""
    import torch

    if isinstance(value, torch.nn.Module):
        held = vars(value)
        tables = [held, *(held.get(table) or {} for table in ("_modules", "_parameters", "_buffers"))]
        return next((table[name] for table in tables if name in table), UNKNOWN)
    if isinstance(value, ModuleType):
        return vars(value).get(name, UNKNOWN)
    return getattr(value, name, UNKNOWN) if isinstance(value, type) and value is torch.Tensor else UNKNOWN


def imports(tree: ast.AST) -> dict[str, Any]:
    """Return what the import statements of a file or function bind, as far as it is loaded; not those of inner functions."""
    found: dict[str, Any] = {}
    for node in _own(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0], UNKNOWN)
                found[alias.asname or alias.name.partition(".")[0]] = module
        elif isinstance(node, ast.ImportFrom):
            home = sys.modules.get(node.module or "") if not node.level else None
            for alias in node.names:
                held = vars(home).get(alias.name, UNKNOWN) if home is not None else UNKNOWN
                found[alias.asname or alias.name] = held
    return found


@functools.lru_cache(maxsize=64)
def _own(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a scope, without those of the scopes in it and of blocks that only a type checker reads."""
    return tuple(_inside(tree))  # a diagnosis asks the same few scopes for name after name


def _inside(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        if not isinstance(child, _OWN_SCOPE):
            yield from _inside(child)


@functools.lru_cache(maxsize=64)
def stored(tree: ast.AST) -> frozenset[str]:
    """Return the names that a scope binds, arguments included."""
    found = arguments_of(tree)
    for node in _own(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, FUNCTIONS | ast.ClassDef):
            found.add(node.name)
    outside = {name for node in _own(tree) if isinstance(node, ast.Global) for name in node.names}
    return frozenset(found - outside)


def arguments_of(tree: ast.AST | None) -> set[str]:
    """Return the names of a function's arguments."""
    return {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)} if isinstance(tree, FUNCTIONS | ast.Lambda) else set()


def assignments(nodes: list[ast.AST]) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Yield every target in a file with what it is given; nothing where that is a part of something."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) else []
        for target in targets:
            value = node.value  # type: ignore[attr-defined]
            if not isinstance(target, ast.Tuple | ast.List):
                yield target, None if isinstance(node, ast.AugAssign) else value
                continue
            several = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else [None] * len(target.elts)
            yield from zip(target.elts, several, strict=True)


def last_name(node: ast.AST) -> str:
    """Return the last name of a dotted one."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@functools.cache
def is_method(name: str) -> bool:
    """Whether tensors have a method of this name."""
    import torch

    return callable(getattr(torch.Tensor, name, None))


def is_torch(value: Any) -> bool:
    """Whether something is a function of torch."""
    home = getattr(value, "__module__", None) or ""
    owner = getattr(value, "__self__", None)
    return callable(value) and not isinstance(value, type) and (home.split(".")[0] == "torch" or _is_torch_owner(owner)) and hasattr(value, "__name__")


def _is_torch_owner(owner: Any) -> bool:
    name = owner.__name__ if isinstance(owner, ModuleType | type) else ""
    return name.startswith(("torch", "_VariableFunctions", "_linalg", "_nn", "_special", "_fft"))


def bare(called: str) -> str:
    """Return the name of a function without its home and underscores."""
    return called.rsplit(".", 1)[-1].strip("_")


def draws(name: str) -> bool:
    """Whether a function of torch draws random numbers."""
    from whynan.capsule.sorts import Sort, sort_of

    def named() -> None: ...

    named.__name__ = name
    return sort_of(named) is Sort.RANDOM and name != "normalize"


def loaded(text: str) -> set[str]:
    """Return the names that a text reads."""
    tree = parsed(text)
    return loaded_by(tree) if tree is not None else set()


def loaded_by(tree: ast.AST) -> set[str]:
    """Return the names that a tree reads."""
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
