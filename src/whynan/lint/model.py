"""A file as the rules see it: imports, functions, classes, and where each name gets its value."""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whynan.lint.sites import Sites

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scoped = Function | ast.Module | ast.Lambda
End = tuple[int, int]
_CALLED = re.compile(rb"(\w+)\(")
_TESTED = re.compile(r"(^|/)tests?/|(^|/)test_[^/]*\.py$|_test\.py$")  # what a test passes says nothing of what a run passes
_LARGEST = 1_000_000
_SEEN = 6  # bindings a use may see before the rest is left out: keeps the time linear


@dataclass(slots=True)
class Binding:
    """One place where a name gets a value; visible after the statement ends."""

    end: End
    value: ast.expr | None
    index: int | None = None  # position in an unpacked tuple
    arms: tuple[tuple[int, int, int, int], ...] = ()  # enclosing branches: lines of the arm, lines of the whole statement
    patch: bool = False  # some entries were overwritten: x[...] = value
    loop: bool = False  # the variable of a for loop
    key: ast.expr | None = None


def end_of(node: ast.stmt | ast.expr) -> End:
    """Where a node ends."""
    return (node.end_lineno or node.lineno, node.end_col_offset or 0)


@dataclass(slots=True)
class Owner:
    """A class: its methods and what is assigned to attributes of self."""

    node: ast.ClassDef
    methods: dict[str, Function] = field(default_factory=dict)
    fields: dict[str, list[tuple[ast.expr, Scope]]] | None = None


def _end(binding: Binding) -> End:
    return binding.end


class Scope:
    """A function (or the module itself) and the names bound in it."""

    __slots__ = ("_bindings", "_tests", "module", "node", "owner", "parent")

    def __init__(self, module: Module, node: Scoped, parent: Scope | None = None, owner: Owner | None = None) -> None:
        self.module, self.node, self.parent, self.owner = module, node, parent, owner
        self._bindings: dict[str, list[Binding]] | None = None
        self._tests: list[tuple[ast.expr, str, set[str]]] | None = None

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "")

    @property
    def bindings(self) -> dict[str, list[Binding]]:
        if self._bindings is None:
            self._bindings = {}
            if not isinstance(self.node, ast.Lambda):
                gather(self.node.body, self._bindings, ())
        return self._bindings

    @property
    def tests(self) -> list[tuple[ast.expr, str, set[str]]]:
        """Every condition that is asked in this scope, with its text and its names."""
        if self._tests is None:
            asked = (
                [] if isinstance(self.node, ast.Lambda) else [n.test for n in ast.walk(self.node) if isinstance(n, ast.If | ast.Assert | ast.While | ast.IfExp)]
            )
            self._tests = [self._spelled(t) for t in sorted(asked, key=lambda t: t.lineno)]
        return self._tests

    def _spelled(self, test: ast.expr) -> tuple[ast.expr, str, set[str]]:
        """A condition with the conditions that its names stand for."""
        written, names = [ast.unparse(test)], set()
        stack: list[ast.AST] = [test]
        while stack:
            for n in ast.walk(stack.pop()):
                if isinstance(n, ast.Attribute):
                    names.add(f"self.{n.attr}")
                elif isinstance(n, ast.Name) and n.id not in names:
                    names.add(n.id)
                    for bound in self.bindings.get(n.id, [])[:2]:
                        if isinstance(bound.value, ast.Compare | ast.BoolOp | ast.UnaryOp):
                            written.append(ast.unparse(bound.value))
                            stack.append(bound.value)
        return test, " ; ".join(written), names

    def parameter(self, name: str) -> tuple[bool, ast.expr | None, ast.expr | None]:
        """Whether a name is a parameter, its default and its annotation."""
        if isinstance(self.node, ast.Module):
            return False, None, None
        given = self.node.args
        plain = [*given.posonlyargs, *given.args]
        defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
        for argument, default in zip([*plain, *given.kwonlyargs], [*defaults, *given.kw_defaults], strict=True):
            if argument.arg == name:
                return True, default, argument.annotation
        return any(a is not None and a.arg == name for a in (given.vararg, given.kwarg)), None, None

    def reaching(self, name: str, at: End) -> list[Binding] | None:
        """The bindings a use may see, or None where the name is not bound here before it."""
        known = self.bindings.get(name)
        if not known:
            return None
        found: list[Binding] = []
        line = at[0]
        for at_index in range(bisect_right(known, at, key=_end) - 1, -1, -1):
            binding = known[at_index]
            if any(not a <= line <= b and c <= line <= d for a, b, c, d in binding.arms):
                continue
            found.append(binding)
            if len(found) == _SEEN or all(a <= line <= b for a, b, _, _ in binding.arms):
                return found
        return found or None


def gather(body: list[ast.stmt], into: dict[str, list[Binding]], arms: tuple[tuple[int, int, int, int], ...]) -> None:
    """Collect the bindings of a block, nested blocks included, nested functions not."""
    for statement in body:
        _gather_one(statement, into, arms)


def _gather_one(s: ast.stmt, into: dict[str, list[Binding]], arms: tuple[tuple[int, int, int, int], ...]) -> None:
    match s:
        case ast.Assign():
            for target in s.targets:
                _bind(target, s.value, end_of(s), into, arms)
        case ast.AnnAssign() if s.value is not None:
            _bind(s.target, s.value, end_of(s), into, arms)
        case ast.AugAssign():
            _bind_augmented(s, into, arms)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method))) if method.endswith("_") and not method.endswith("__"):
            into.setdefault(name, []).append(Binding(end_of(s), s.value, None, arms))
        case ast.For() | ast.AsyncFor():
            _bind(s.target, s.iter, (s.iter.end_lineno or s.lineno, s.iter.end_col_offset or 0), into, arms, loop=True)
            gather(s.body, into, (*arms, _arm(s.body, s)))
        case ast.While():
            gather(s.body, into, (*arms, _arm(s.body, s)))
        case ast.With() | ast.AsyncWith():
            for item in s.items:
                if item.optional_vars is not None:
                    _bind(item.optional_vars, item.context_expr, end_of(item.context_expr), into, arms)
            gather(s.body, into, arms)
        case ast.If():
            gather(s.body, into, (*arms, _arm(s.body, s)))
            if s.orelse:
                gather(s.orelse, into, (*arms, _arm(s.orelse, s)))
        case ast.Try() | ast.TryStar():
            gather(s.body, into, arms)
            for handler in s.handlers:
                gather(handler.body, into, (*arms, _arm(handler.body, s)))
            gather([*s.orelse, *s.finalbody], into, arms)
        case _:
            pass


def _arm(body: list[ast.stmt], whole: ast.stmt) -> tuple[int, int, int, int]:
    return body[0].lineno, body[-1].end_lineno or 0, whole.lineno, whole.end_lineno or 0


def _bind(target: ast.expr, value: ast.expr, end: End, into: dict[str, list[Binding]], arms: tuple[tuple[int, int, int, int], ...], loop: bool = False) -> None:
    match target:
        case ast.Name(id=name):
            into.setdefault(name, []).append(Binding(end, value, None, arms, loop=loop))
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts) and not loop else None
            for index, part in enumerate(parts):
                name = part.id if isinstance(part, ast.Name) else ast.unparse(part) if isinstance(part, ast.Attribute) else ""
                if name:
                    into.setdefault(name, []).append(Binding(end, values[index] if values else value, None if values else index, arms, loop=loop))
        case ast.Subscript(value=ast.Name(id=name), slice=key):
            into.setdefault(name, []).append(Binding(end, value, None, arms, patch=True, key=key))
        case ast.Attribute(value=ast.Name(id=base), attr=attribute):
            into.setdefault(f"{base}.{attribute}", []).append(Binding(end, value, None, arms, loop=loop))
        case _:
            pass


def _bind_augmented(s: ast.AugAssign, into: dict[str, list[Binding]], arms: tuple[tuple[int, int, int, int], ...]) -> None:
    plain = isinstance(s.target, ast.Attribute) and isinstance(s.target.value, ast.Name)
    if not isinstance(s.target, ast.Name) and not plain:
        return
    loaded = ast.copy_location(ast.Name(s.target.id, ast.Load()) if isinstance(s.target, ast.Name) else s.target, s.target)
    value = ast.copy_location(ast.BinOp(loaded, s.op, s.value), s)
    name = s.target.id if isinstance(s.target, ast.Name) else ast.unparse(s.target)
    into.setdefault(name, []).append(Binding(end_of(s), value, None, arms))


class Module:
    """One parsed file."""

    def __init__(self, path: Path, text: str, tree: ast.Module, project: Project | None = None) -> None:
        self.path, self.text, self.tree, self.project = path, text, tree, project
        self.scope = Scope(self, tree)
        self.imports: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        self.owners: dict[str, Owner] = {}
        self.inner_owners: list[Owner] = []
        self._scopes: dict[int, Scope] = {}
        self.sites: Sites | None = None
        for statement in tree.body:
            self._take(statement)

    def _take(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Import | ast.ImportFrom):
            note_import(s, self.imports)
        elif isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions[s.name] = s
        elif isinstance(s, ast.ClassDef):
            methods: dict[str, Function] = {m.name: m for m in s.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
            self.owners[s.name] = Owner(s, methods)
        elif isinstance(s, ast.Try | ast.If):
            for inner in [*s.body, *s.orelse, *(h for handler in getattr(s, "handlers", []) for h in handler.body)]:
                self._take(inner)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def dotted(self, node: ast.expr) -> str:
        """The full name an expression stands for through imports, or ""."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        base = self.imports.get(node.id)
        return ".".join([base, *reversed(parts)]) if base else ""

    def fields(self, owner: Owner) -> dict[str, list[tuple[ast.expr, Scope]]]:
        """What the methods of a class assign to attributes of self, and its class-level values."""
        if owner.fields is None:
            owner.fields = {}
            for statement in owner.node.body:
                if isinstance(statement, ast.AnnAssign) and statement.value is not None and isinstance(statement.target, ast.Name):
                    owner.fields.setdefault(statement.target.id, []).append((statement.value, self.scope))
                elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    owner.fields.setdefault(statement.targets[0].id, []).append((statement.value, self.scope))
            for method in owner.methods.values():
                scope = self.scope_of(method, owner)
                for name, bindings in scope.bindings.items():
                    if name.startswith("self."):
                        owner.fields.setdefault(name[5:], []).extend((b.value, scope) for b in bindings if b.value is not None and b.index is None)
        return owner.fields

    def scope_of(self, function: Function, owner: Owner | None, parent: Scope | None = None) -> Scope:
        """The scope of a function, made once."""
        known = self._scopes.get(id(function))
        if known is None:
            known = self._scopes[id(function)] = Scope(self, function, parent or self.scope, owner)
        return known

    def release(self) -> None:
        """Break the cycles with the scopes, so that the tree goes at once: the cycle collector is off while files are read."""
        for owner in [*self.owners.values(), *self.inner_owners]:
            owner.fields = None
        self.owners.clear()
        self._scopes.clear()
        self.sites = None
        self.inner_owners.clear()
        del self.scope

    def imported(self, dotted: str) -> tuple[Module, str] | None:
        """The module of the project that defines a dotted name, and the name in it."""
        return self.project.find(self, dotted) if self.project is not None else None


def note_import(s: ast.Import | ast.ImportFrom, into: dict[str, str]) -> None:
    """Write down what an import statement makes a name stand for."""
    if isinstance(s, ast.Import):
        for alias in s.names:
            into[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
    else:
        base = "." * s.level + (s.module or "")
        for alias in s.names:
            into[alias.asname or alias.name] = f"{base}.{alias.name}" if not base.endswith(".") else base + alias.name


def parse(text: str) -> ast.Module:
    """Parse without the warnings Python has about other people's escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


class Project:
    """Helper files are parsed when a rule asks what a helper returns, each once."""

    def __init__(self, files: list[Path] | None = None) -> None:
        self._known: dict[Path, Module | None] = {}
        self._files = files or []
        self._calling: dict[bytes, list[Path]] | None = None

    def naming(self, name: str) -> list[Path]:
        """The files, tests left out, in which something of this name is called; every file is searched once, when the first name is asked for."""
        if self._calling is None:
            self._calling = {}
            for path in self._files:
                for called in _called_in(path):
                    self._calling.setdefault(called, []).append(path)
        return self._calling.get(name.encode(), [])

    def find(self, seeker: Module, dotted: str) -> tuple[Module, str] | None:
        """Resolve `.helpers.safe_log` or `package.helpers.safe_log` as seen from a file."""
        name = dotted.rpartition(".")[2]
        for path in candidates(seeker.path, dotted.rpartition(".")[0]):
            found = self.load(path)
            if found is not None and (name in found.functions or name in found.owners or name in found.scope.bindings):
                return found, name
        return None

    def load(self, path: Path) -> Module | None:
        """A file of the project, parsed once; None where it cannot be."""
        if path not in self._known:
            self._known[path] = self._parse(path)
        return self._known[path]

    def _parse(self, path: Path) -> Module | None:
        try:
            if not path.is_file() or path.stat().st_size > _LARGEST:
                return None
            text = path.read_text(encoding="utf-8")
            return Module(path, text, parse(text), self)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def _called_in(path: Path) -> set[bytes]:
    try:
        if path.suffix != ".py" or _TESTED.search("/".join(path.parts[-4:])) or path.stat().st_size > _LARGEST:
            return set()
        raw = path.read_bytes()
        return set(_CALLED.findall(raw)) if b"torch" in raw else set()
    except OSError:
        return set()


def candidates(path: Path, package: str) -> Iterator[Path]:
    """Where a module may lie: beside the file for a relative import, in a folder above for a full name."""
    level = len(package) - len(package.lstrip("."))
    parts = [p for p in package.strip(".").split(".") if p]
    bases = [path.parents[level - 1]] if 0 < level <= len(path.parents) else list(path.parents)[:6] if level == 0 else []
    for base in bases:
        target = base.joinpath(*parts)
        if parts and level == 0 and not (base / parts[0]).exists() and not (base / f"{parts[0]}.py").exists():
            continue
        yield target.with_suffix(".py") if parts else target / "__init__.py"
        yield target / "__init__.py"
