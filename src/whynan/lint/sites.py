"""Where the project calls a function: in its own file, and in the files that name it.

**Cost:** nothing until a finding of high confidence asks. Then each file is searched once for the names it calls, and few files are parsed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from whynan.lint.calls import foreign_name
from whynan.lint.model import Function, Module, Owner, Scope

_FILES = 8  # files looked into for the calls of one function: keeps the time linear
_CALLS = 24
_MOVED = frozenset({"to", "cuda", "float", "half", "double", "eval", "train", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Site:
    """One call, where it stands and what encloses it."""

    call: ast.Call
    scope: Scope
    no_grad: bool = False
    looped: bool = False


@dataclass(slots=True)
class Sites:
    """The calls of one file by the last part of the name that is called, and what each class was made into."""

    calls: dict[str, list[Site]] = field(default_factory=dict)
    instances: dict[str, set[str]] = field(default_factory=dict)


def calls_of(function: Function, scope: Scope) -> tuple[list[Site], bool]:
    """The calls of a function outside tests, and whether these are all that the project shows."""
    module, owner = scope.module, scope.owner
    name = owner.node.name if owner is not None and function.name in ("forward", "__call__") else function.name
    found = list(islice(_in_file(module, function, owner, module), _CALLS + 1))
    files = [p for p in _naming(module, name) if p != module.path]
    for path in files[:_FILES]:
        other = module.project.load(path) if module.project is not None else None
        if other is not None and _knows(other, module, name, owner):
            found.extend(islice(_in_file(other, function, owner, module), _CALLS + 1))
    return found[:_CALLS], len(files) <= _FILES and len(found) <= _CALLS


def _naming(module: Module, name: str) -> list[Path]:
    return module.project.naming(name) if module.project is not None else []


def _knows(other: Module, module: Module, name: str, owner: Owner | None) -> bool:
    """Whether a file can mean this function: it imports the name, its class or its module."""
    wanted = {name, module.path.stem, *([owner.node.name] if owner is not None else [])}
    return any(wanted & set(full.split(".")) for full in other.imports.values())


def _in_file(module: Module, function: Function, owner: Owner | None, home: Module) -> Iterator[Site]:
    sites = of_file(module)
    if owner is not None and function.name in ("forward", "__call__"):
        for made in sites.instances.get(owner.node.name, ()):
            yield from sites.calls.get(made, ())
        return
    for site in sites.calls.get(function.name, ()):
        if site.scope.node is not function and _means(site, function, owner, home):
            yield site


def _means(site: Site, function: Function, owner: Owner | None, home: Module) -> bool:
    """Whether a call by this name can be of this function and not of another library's or another class's."""
    called, own = site.call.func, site.scope.module is home
    if isinstance(called, ast.Name):
        return owner is None and (own or _comes_from(site.scope.module.imports.get(called.id, ""), home))
    dotted = site.scope.module.dotted(called)
    if dotted.startswith("torch.") or foreign_name(dotted):
        return False
    if owner is None:
        return _comes_from(dotted, home)
    by_self = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"
    theirs = site.scope.owner
    return not by_self or theirs is None or theirs.methods.get(function.name) in (None, function)


def _comes_from(dotted: str, home: Module) -> bool:
    """Whether an imported name can come from a file: through the file's name, or through a package it lies in."""
    parts = dotted.lstrip(".").split(".")
    if dotted.startswith(".") and len(parts) == 1:
        return True
    return bool(set(parts[:-1]) & {home.path.stem, *home.path.parts[-3:-1]})


def of_file(module: Module) -> Sites:
    """The calls of a file, gathered once."""
    if module.sites is None:
        module.sites = Sites()
        with suppress(RecursionError):  # of a file nested too deeply only the first calls are known
            _block(module.tree.body, module.scope, None, (False, False), module.sites)
    return module.sites


def _block(body: list[ast.stmt], scope: Scope, owner: Owner | None, around: tuple[bool, bool], into: Sites) -> None:
    for s in body:
        _statement(s, scope, owner, around, into)


def _statement(s: ast.stmt, scope: Scope, owner: Owner | None, around: tuple[bool, bool], into: Sites) -> None:
    no_grad, looped = around
    if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef):
        quiet = no_grad or any(_quiet(d) for d in s.decorator_list)
        _block(s.body, scope.module.scope_of(s, owner or scope.owner, scope), None, (quiet, False), into)
        return
    if isinstance(s, ast.ClassDef):
        known = scope.module.owners.get(s.name)
        _block(s.body, scope, known if known is not None and known.node is s else Owner(s), around, into)
        return
    if isinstance(s, ast.With | ast.AsyncWith):
        no_grad = no_grad or any(_quiet(i.context_expr) for i in s.items)
    looped = looped or isinstance(s, ast.For | ast.AsyncFor | ast.While)
    for child in ast.iter_child_nodes(s):
        if isinstance(child, ast.stmt):
            _statement(child, scope, owner, (no_grad, looped), into)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            _block(child.body, scope, owner, (no_grad, looped), into)
        else:
            _expression(child, scope, (no_grad, looped), into)
    if isinstance(s, ast.Assign):
        _note_instance(s, into)


def _expression(node: ast.AST, scope: Scope, around: tuple[bool, bool], into: Sites) -> None:
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            name = last_name(one.func)
            if name:
                into.calls.setdefault(name, []).append(Site(one, scope, *around))


def _note_instance(s: ast.Assign, into: Sites) -> None:
    """After net = Net(...).to(device), net is an instance of Net."""
    made = s.value
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _MOVED:
        made = made.func.value
    if isinstance(made, ast.Call):
        into.instances.setdefault(last_name(made.func), set()).update(last_name(t) for t in s.targets)


def last_name(node: ast.expr) -> str:
    """The f of f(x), of module.f(x) and of self.f(x)."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _quiet(node: ast.expr) -> bool:
    written = ast.unparse(node)
    return "no_grad" in written or "inference_mode" in written
