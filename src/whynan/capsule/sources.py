"""The user's source a capsule carries: which files define the classes, functions and places of a step.

Text only. Nothing of it runs unless whoever replays the capsule says `--trust`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import linecache
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

from whynan.capsule.imports import defined, imported, is_elsewhere_too, is_users, parsed
from whynan.capsule.made import functions_of, parts, reads, settings_of
from whynan.capsule.sites import Site, positions, shorten
from whynan.capsule.statements import find_class, number_of
from whynan.records import Json

LIMIT = 4 << 20  # bytes of one source file
FILES = 1500  # more are not read back


@dataclass(slots=True, eq=False)
class Source:
    """One file."""

    file: str  # as code objects name it
    shown: str  # as reports name it
    text: str
    stored: str  # in the capsule
    module: str = ""
    package: str = ""
    main: bool = False
    runs: bool = False  # its definitions are needed for a replay
    globals: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        raw = self.text.encode()
        return {
            "path": self.stored, "shown": self.shown, "module": self.module, "package": self.package, "main": self.main, "runs": self.runs,
            "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(),
        }  # fmt: skip


class Sources:
    """Collects files by need."""

    def __init__(self) -> None:
        self.files: dict[str, Source | None] = {}
        self.packages: dict[str, str] = {}
        self.imports: set[str] = set()
        self.lost: list[str] = []
        self._modules: dict[str, Source | None] = {}
        self._waiting: list[str] = []  # modules that the files taken in so far import
        self._seen: set[int] = set()
        self._stored: set[str] = set()
        self.alive: list[object] = []

    def number(self, source: Source) -> int:
        """Return the place of a file in the list the capsule holds."""
        return [s for s in self.files.values() if s is not None].index(source)

    def listed(self) -> list[Source]:
        """Return the files in order."""
        return [s for s in self.files.values() if s is not None]

    def of_file(self, file: str) -> Source | None:
        """Take a file in, if its text can be had."""
        if file not in self.files:
            lines = linecache.getlines(file)
            text = "".join(lines)
            fit = len(text) <= LIMIT and (bool(lines) or _is_empty(file))
            self.files[file] = Source(file, shorten(file), text, self._name_for(shorten(file))) if fit else None
        return self.files[file]

    def _name_for(self, shown: str) -> str:
        path = PurePath(shown)
        parts = [_clean(p) for p in path.parts] if not path.is_absolute() and ".." not in path.parts else [_clean(path.name)]
        stem = "/".join(parts).removesuffix(".py") or "code"
        name, number = f"source/{stem}.py", 1
        while name in self._stored:
            number += 1
            name = f"source/{stem}-{number}.py"
        self._stored.add(name)
        return name

    def site(self, site: Site | None) -> Json:
        """Write a place down so that it can be found again in the carried text."""
        if site is None:
            return None
        source = self.of_file(site.code.co_filename)
        number = self.number(source) if source is not None else None
        code = site.code
        place: dict[str, Json] = {"source": number, "shown": shorten(code.co_filename), "name": code.co_qualname, "first": code.co_firstlineno}
        return {**place, "lasti": site.lasti, "at": list(positions(site))}

    def module(self, module: ModuleType) -> str:
        """Name a module that an object holds."""
        if is_users(module):
            self._take_module(module.__name__)
        else:
            self._package(module.__name__)
        return module.__name__

    def class_(self, cls: type) -> dict[str, Json] | None:
        """Say where a class is defined, taking its file in; for installed packages its name and version."""
        module = sys.modules.get(cls.__module__)
        if module is not None and not is_users(module):
            self._package(cls.__module__)
            found: Any = module
            for part in cls.__qualname__.split("."):
                found = getattr(found, part, None)
            return {"package": cls.__module__, "name": cls.__qualname__} if found is cls else None
        source = self._take_module(cls.__module__)
        if source is None:
            return None
        if id(cls) not in self._seen:
            self._seen.add(id(cls))
            self.alive.append(cls)
            for method in functions_of(cls):
                self._names_in(method)
            for base in cls.__mro__[1:]:
                self._follow(base)
            if "<locals>" not in cls.__qualname__:
                source.globals.update({f"{cls.__qualname__}.{name}": value for name, value in settings_of(cls).items()})
            self._names_of_body(source, find_class(parsed(source.text), cls.__qualname__, _first_line(cls)), cls.__module__)
        return {"source": self.number(source), "name": cls.__qualname__, "line": _first_line(cls)}

    def function(self, function: FunctionType) -> dict[str, Json] | None:
        """Do the same for a function."""
        code, home = function.__code__, function.__globals__.get("__name__", "")  # __module__ and __qualname__ may be those of a wrapped function
        module = sys.modules.get(home)
        place: dict[str, Json] = {"name": code.co_qualname, "line": code.co_firstlineno}
        if module is not None and not is_users(module):
            self._package(home)
            return {"package": home, **place}
        source = self._take_module(home)
        if source is None or os.path.abspath(code.co_filename) != os.path.abspath(source.file):
            return None
        self._names_in(function)
        nth = number_of(source.text, code) if code.co_name == "<lambda>" else 0
        return {"source": self.number(source), **place, "nth": nth}

    def settle(self) -> None:
        """Take in the modules that the files import, and those that these import."""
        while self._waiting:
            name = self._waiting.pop()
            module = sys.modules.get(name)
            if module is None or name in self._modules or is_elsewhere_too(module):
                continue
            if not is_users(module) or len(self.files) >= FILES or self._take_module(name) is None:
                self._modules[name] = None
                self.lost.append(f"module {name}: its Python source was not found" if len(self.files) < FILES else f"module {name}: too many files")

    def _take_module(self, name: str) -> Source | None:
        if name not in self._modules:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            source = self.of_file(_code_file(module, file)) if module is not None and file is not None else None
            if module is None or source is None:
                return None
            if source.runs:  # one file under two names, such as a script that its own modules import
                source = self.files[f"{name}:{source.file}"] = replace(source, stored=self._name_for(source.shown), globals={})
            self._modules[name] = source
            self._run_as(source, name, module)
        return self._modules[name]

    def _run_as(self, source: Source, name: str, module: ModuleType) -> None:
        spec = getattr(module, "__spec__", None)
        source.runs, source.main = True, name == "__main__"
        source.module = (spec.name if spec is not None else "") if source.main else name
        source.package = getattr(module, "__package__", "") or ""
        self._waiting += _parents(source.package if source.main else name)
        for wanted in imported(source.text, source.package):
            self._waiting += _parents(wanted)

    def _names_in(self, function: FunctionType) -> None:
        """Note the global variables a function reads, and those of the user's functions and classes it names or is made of."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.alive.append(function)
        for part in parts(function):
            self._follow(part)
        space = function.__globals__
        module = sys.modules.get(space.get("__name__", ""))
        if module is None or not is_users(module):
            return
        source = self._take_module(module.__name__)
        for name, *attributes in reads(function.__code__):
            if name in space:
                self._note(source, name, space[name], attributes)

    def _names_of_body(self, source: Source, tree: ast.AST | None, module: str) -> None:
        """Note the global variables that a statement itself reads: bases, decorators, defaults, class attributes."""
        space = vars(sys.modules[module])
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Name) and node.id in space:
                self._note(source, node.id, space[node.id], [])

    def _note(self, source: Source | None, name: str, value: Any, attributes: list[str]) -> None:
        if isinstance(value, ModuleType):
            if is_users(value):
                home, read = self._take_module(value.__name__), [a for a in attributes[:1] if a in vars(value)]
                for attribute in read:
                    self._note(home, attribute, vars(value)[attribute], attributes[1:])
            return
        if isinstance(value, FunctionType | type) and self._follow(value):
            return
        if source is not None and name not in source.globals and not (name.startswith("__") and name.endswith("__")):
            source.globals[name] = value

    def is_brought(self, source: Source, name: str) -> bool:
        """Whether a replay gets a global variable that cannot be written down from the statement that made it: a decorated `def`, an import."""
        statement = defined(source.text, name, whole=not source.main)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self._names_of_body(source, statement, "__main__" if source.main else source.module)
        return statement is not None

    def _follow(self, value: Any) -> bool:
        """Look into a function or class; return whether a definition or an import of its own brings it."""
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if not isinstance(value, FunctionType | type) or module is None:
            return False
        if isinstance(value, FunctionType):
            self._names_in(value)
        elif is_users(module):
            self.class_(value)
        made_by_a_call = isinstance(value, FunctionType) and "<locals>" in value.__code__.co_qualname
        if isinstance(value, FunctionType) and is_users(module) and not made_by_a_call and vars(value).keys() - {"__wrapped__"}:
            return False  # it has attributes, which a program may set anywhere
        return vars(module).get(value.__name__) is value or not (is_users(module) or made_by_a_call)

    def _package(self, module: str) -> None:
        top = module.partition(".")[0]
        self.imports.add(module)
        if top in sys.stdlib_module_names or top in ("torch", "whynan") or top in self.packages:
            return
        try:
            self.packages[top] = importlib.metadata.version((importlib.metadata.packages_distributions().get(top) or [top])[0])
        except (importlib.metadata.PackageNotFoundError, OSError):
            self.packages[top] = ""


def _is_empty(file: str) -> bool:
    try:
        return os.path.getsize(file) == 0
    except OSError:
        return False


def _code_file(module: ModuleType, file: str) -> str:
    """Return the file name as the module's code objects spell it."""
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            named = value.__code__.co_filename
            if os.path.basename(named) == os.path.basename(file):
                return named
    return os.path.abspath(file)


def _parents(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [p for i in range(1, len(parts) + 1) if (p := ".".join(parts[:i])) in sys.modules and p != "__main__"]


def _first_line(cls: type) -> int:
    known = vars(cls).get("__firstlineno__")  # Python 3.13
    if known is not None:
        return int(known)
    return min((f.__code__.co_firstlineno for f in functions_of(cls) if f.__qualname__.startswith(cls.__qualname__ + ".")), default=0)


def _clean(part: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in part).lstrip(".") or "_"
